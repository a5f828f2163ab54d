/* Memory: regions of the address space, bytes used of the device, and copies. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "stub.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static const size_t GRANULE = 2 * MIB;
static const size_t CONTEXT_BYTES = 560 * MIB; /* of a CUDA context and its modules */

enum { MAX_REGIONS = 1 << 16, MAX_SEGMENTS = 1 << 20 };
static struct region {
    char *begin;
    size_t size;
    int is_host;
} regions[MAX_REGIONS];
static int n_regions;
static size_t used;
static size_t segment_sizes[MAX_SEGMENTS];
static int n_segments = 1;

size_t device_bytes(void) { return setting("GPU_STUB_BYTES", 150754820096); }

static size_t rounded(size_t size) { return (size + GRANULE - 1) / GRANULE * GRANULE; }

static int take_bytes(size_t size)
{
    pthread_mutex_lock(&mutex);
    int is_full = CONTEXT_BYTES + used + size > device_bytes();
    if (!is_full)
        used += size;
    pthread_mutex_unlock(&mutex);
    if (is_full)
        count_bytes("memory", "out of memory", size);
    return is_full ? OUT_OF_MEMORY : SUCCESS;
}

static void free_bytes(size_t size)
{
    pthread_mutex_lock(&mutex);
    used -= size;
    pthread_mutex_unlock(&mutex);
}

static void add_region(void *begin, size_t size, int is_host)
{
    pthread_mutex_lock(&mutex);
    int i = 0;
    while (i < n_regions && regions[i].begin)
        i++;
    if (i == n_regions)
        n_regions++;
    regions[i] = (struct region){begin, size, is_host};
    pthread_mutex_unlock(&mutex);
}

static struct region find_region(const void *pointer)
{
    struct region found = {NULL, 0, 1};
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < n_regions && !found.begin; i++) {
        struct region *r = &regions[i];
        if (r->begin && (char *)pointer >= r->begin && (char *)pointer < r->begin + r->size)
            found = *r;
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

/* Remove the region that begins at `begin`; return its size. */
static size_t remove_region(void *begin)
{
    size_t size = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < n_regions; i++) {
        if (begin && regions[i].begin == begin) {
            size = regions[i].size;
            regions[i].begin = NULL;
        }
    }
    pthread_mutex_unlock(&mutex);
    return size;
}

void *map_region(size_t size, int is_host)
{
    int protection = is_host ? PROT_READ | PROT_WRITE : PROT_NONE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *begin = mmap(NULL, size, protection, flags, -1, 0);
    if (begin == MAP_FAILED)
        return NULL;
    add_region(begin, size, is_host);
    return begin;
}

static size_t unmap_region(void *begin)
{
    size_t size = remove_region(begin);
    if (size)
        munmap(begin, size);
    return size;
}

int cudaMalloc(void **pointer, size_t size)
{
    if (take_bytes(rounded(size)))
        return OUT_OF_MEMORY;
    *pointer = map_region(size, 0);
    return count_bytes("memory", "cudaMalloc", size);
}

int cudaFree(void *pointer)
{
    if (pointer) {
        free_bytes(rounded(unmap_region(pointer)));
        count_call("memory", "cudaFree");
    }
    return SUCCESS;
}

int cudaMallocAsync(void **pointer, size_t size, void *stream) { return cudaMalloc(pointer, size); }
int cudaFreeAsync(void *pointer, void *stream) { return cudaFree(pointer); }

int cudaHostAlloc(void **pointer, size_t size, unsigned flags)
{
    *pointer = map_region(size, 1);
    return count_bytes("memory", "cudaHostAlloc", size);
}

int cudaFreeHost(void *pointer)
{
    unmap_region(pointer);
    return SUCCESS;
}

int cudaHostRegister(void *pointer, size_t size, unsigned flags)
{
    add_region(pointer, size, 1);
    return count_bytes("memory", "cudaHostRegister", size);
}

int cudaHostUnregister(void *pointer)
{
    remove_region(pointer);
    return SUCCESS;
}

/* Expandable segments reserve addresses, and map physical memory there as they grow. */
int cuMemAddressReserve(uintptr_t *pointer, size_t size)
{
    *pointer = (uintptr_t)map_region(size, 0);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemAddressFree(uintptr_t pointer, size_t size)
{
    unmap_region((void *)pointer);
    return SUCCESS;
}

int cuMemCreate(unsigned long long *handle, size_t size)
{
    if (take_bytes(size))
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&mutex);
    *handle = n_segments++;
    segment_sizes[*handle] = size;
    pthread_mutex_unlock(&mutex);
    return count_bytes("memory", "cuMemCreate", size);
}

int cuMemRelease(unsigned long long handle)
{
    free_bytes(segment_sizes[handle]);
    return count_bytes("memory", "cuMemRelease", segment_sizes[handle]);
}

int cuMemGetAllocationGranularity(size_t *granularity)
{
    *granularity = GRANULE;
    return SUCCESS;
}

int cudaMemGetInfo(size_t *available, size_t *total)
{
    *total = device_bytes();
    *available = *total - CONTEXT_BYTES - used;
    return SUCCESS;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    struct region region = find_region(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->device = region.begin ? 0 : -2;
    attributes->type = !region.begin ? cudaMemoryTypeUnregistered
                       : region.is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->devicePointer = region.begin ? (void *)pointer : NULL;
    attributes->hostPointer = region.begin && region.is_host ? (void *)pointer : NULL;
    return SUCCESS;
}

/* Triton's launcher asks for the device address of each tensor. */
int cuPointerGetAttribute(uintptr_t *value, int attribute, uintptr_t pointer)
{
    *value = pointer;
    return SUCCESS;
}

static const char *place(struct region region)
{
    return !region.begin ? "pageable" : region.is_host ? "pinned" : "device";
}

static int copy(const char *kind, void *to, const void *from, size_t size)
{
    struct region target = find_region(to), source = find_region(from);
    char name[64];
    snprintf(name, sizeof name, "%s to %s", place(source), place(target));
    if (target.is_host && source.is_host)
        memmove(to, from, size);
    else if (target.is_host)
        memset(to, 0, size);
    return count_bytes(kind, name, size);
}

int cudaMemcpy(void *to, const void *from, size_t size, int direction)
{
    count_call("sync", "cudaMemcpy");
    return copy("copy", to, from, size);
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int direction, void *stream)
{
    return copy("copy", to, from, size);
}

int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size)
{
    return copy("copy", to, from, size);
}

int cudaMemset(void *pointer, int value, size_t size)
{
    return count_bytes("memset", "cudaMemset", size);
}

int cudaMemsetAsync(void *pointer, int value, size_t size, void *stream)
{
    return count_bytes("memset", "cudaMemsetAsync", size);
}

int cudaMemcpyToSymbol(void) { return SUCCESS; }

int cudaGetSymbolAddress(void **pointer, const void *symbol)
{
    static void *address;
    if (!address)
        address = map_region(MIB, 0);
    *pointer = address;
    return SUCCESS;
}
