/*
 * The marks of thinking: what a family writes before and after its thoughts, and around its answer. One table
 * for prompts, the parser, grammars and budgets. A new family is a row.
 */
#ifndef STEEL_TEXT_CHAT_MARKS_H
#define STEEL_TEXT_CHAT_MARKS_H

#include "text/chat/chat_parse.h"

enum chat_thinking {
    CHAT_THINKS_NOT,
    CHAT_THINKS_MAYBE, /* the model may start reasoning itself */
    CHAT_THINKS_FIRST, /* the prompt has opened the reasoning */
};

struct chat_marks {
    const char *name;
    const char *open, *close; /* around thinking; close is one tag */
    const char *begin;        /* opens thinking in a prompt, as the model writes it */
    /* Ends thinking early: `end` has a sentence that says why, `end_at_once` is for thinking that has just begun. */
    const char *end, *end_at_once;
    const char *not_after; /* must not follow the early end; NULL = none */
    bool reopens;          /* thinking may begin again later */
    const char *plain;     /* begins an answer without thinking; NULL = nothing does */
    const char *closed;    /* the end of a prompt that allows no thinking; NULL = close */
    /* May surround the answer and do not belong to it. */
    const char *answer[5], *answer_end[3];
    const char
        *call; /* begins a call also inside thinking, which then has no end; NULL = nothing does */
};

/* The marks of a format's replies. thoughts: of the template; Mistral, Gemma and gpt-oss always have their own. */
const struct chat_marks *chat_marks_of(enum chat_format f, enum chat_thoughts thoughts, bool tools);
/* Finds the marks that a template mentions. */
enum chat_thoughts chat_thoughts_detect(const char *template, size_t len);
const char *chat_thoughts_name(enum chat_thoughts t);
/* Whether the prompt ends inside a reasoning block that the template opened. */
bool chat_opens_reasoning(const char *prompt, size_t len);
/* How a reply to this prompt begins. */
enum chat_thinking chat_thinking_of(const char *prompt, size_t len);

#endif
