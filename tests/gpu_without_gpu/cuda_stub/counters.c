/* Counters: calls and bytes by kind and name. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "stub.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

enum { MAX_COUNTERS = 1 << 14 };
static struct counter {
    const char *kind, *name;
    unsigned long long calls, bytes;
} counters[MAX_COUNTERS];

int count_bytes(const char *kind, const char *name, size_t bytes)
{
    unsigned hash = 5381;
    for (const char *p = name; *p; p++)
        hash = hash * 33 + (unsigned char)*p;
    pthread_mutex_lock(&mutex);
    struct counter *c = &counters[hash % MAX_COUNTERS];
    while (c->name && (strcmp(c->name, name) || strcmp(c->kind, kind)))
        c = c + 1 < counters + MAX_COUNTERS ? c + 1 : counters;
    if (!c->name) {
        c->kind = kind;
        c->name = strdup(name);
    }
    c->calls++;
    c->bytes += bytes;
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

int count_call(const char *kind, const char *name)
{
    return count_bytes(kind, name, 0);
}

/* Write the counters to a file, one a line, and begin again at zero. */
int gpu_stub_take(const char *path)
{
    FILE *file = fopen(path, "w");
    if (!file)
        return 1;
    pthread_mutex_lock(&mutex);
    for (struct counter *c = counters; c < counters + MAX_COUNTERS; c++) {
        if (c->calls)
            fprintf(file, "%llu\t%llu\t%s\t%s\n", c->calls, c->bytes, c->kind, c->name);
        c->calls = c->bytes = 0;
    }
    pthread_mutex_unlock(&mutex);
    return fclose(file);
}

void *new_handle(void)
{
    static uintptr_t last = 4096;
    return (void *)__sync_add_and_fetch(&last, 64);
}
