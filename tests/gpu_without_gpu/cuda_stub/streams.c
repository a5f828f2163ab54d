/* Streams and events: everything is done at once. */
#include "stub.h"

int create(void **handle)
{
    *handle = new_handle();
    return SUCCESS;
}

int cudaStreamCreate(void **stream) { return create(stream); }
int cudaStreamCreateWithPriority(void **stream) { return create(stream); }
int cudaStreamCreateWithFlags(void **stream) { return create(stream); }
int cudaEventCreate(void **event) { return create(event); }
int cudaEventCreateWithFlags(void **event) { return create(event); }
int cudaDeviceGetDefaultMemPool(void **pool) { return create(pool); }

int cudaEventElapsedTime(float *milliseconds)
{
    *milliseconds = 1.0f;
    return SUCCESS;
}

int cudaStreamGetPriority(void *stream, int *priority)
{
    *priority = 0;
    return SUCCESS;
}

static int wait(const char *name)
{
    return count_call(is_capturing() ? "captured sync" : "sync", name);
}

int cudaStreamSynchronize(void *s) { return wait("cudaStreamSynchronize"); }
int cudaDeviceSynchronize(void) { return wait("cudaDeviceSynchronize"); }
int cudaEventSynchronize(void *e) { return wait("cudaEventSynchronize"); }
int cuStreamSynchronize(void *s) { return wait("cuStreamSynchronize"); }
int cuCtxSynchronize(void) { return wait("cuCtxSynchronize"); }

int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data)
{
    function(data);
    return SUCCESS;
}

int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *data)
{
    function(stream, SUCCESS, data);
    return SUCCESS;
}
