/*
 * Which rows a tile of a product has: TILE adjacent ones, or with GROUPED those of one expert, as group.comp lists them
 * (words: the number of tiles, where the list of rows begins, then three per tile: expert, first of its rows in the list,
 * rows).
 */

struct tile_rows {
    uint expert, first, n;
    uint64_t list; /* 0 = rows from `first` on */
};

/* n 0: there is no such tile. */
tile_rows tile_of(uint i, uint64_t groups, uint rows)
{
    if (GROUPED == 0)
        return tile_rows(0, i * TILE, min(TILE, rows - i * TILE), 0);
    Words g = Words(groups);
    if (i >= g.v[0])
        return tile_rows(0, 0, 0, 0);
    uint at = 4 + 3 * i;
    return tile_rows(g.v[at], g.v[at + 1], g.v[at + 2], groups + 4 * uint64_t(g.v[1]));
}

uint tile_row(tile_rows t, uint i)
{
    return GROUPED == 0 ? t.first + i : Words(t.list).v[t.first + i];
}
