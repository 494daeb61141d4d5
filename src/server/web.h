/* The embedded web page. */
#ifndef STEEL_SERVER_WEB_H
#define STEEL_SERVER_WEB_H

extern const char web_page[], web_page_end[];

#endif
