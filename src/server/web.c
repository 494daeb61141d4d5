/* The web page, as it stands in src/server/web/index.html, inside the program. */
#include "server/web.h"

__asm__(".section .rodata\n"
        ".global web_page, web_page_end\n"
        "web_page: .incbin \"src/server/web/index.html\"\n"
        "web_page_end: .byte 0\n"
        ".previous\n");
