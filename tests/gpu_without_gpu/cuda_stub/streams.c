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

static int is_capturing(int *status)
{
    *status = 0;
    return SUCCESS;
}

int cudaStreamIsCapturing(void *stream, int *status) { return is_capturing(status); }
int cuStreamIsCapturing(void *stream, int *status) { return is_capturing(status); }

int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id)
{
    if (id)
        *id = 0;
    return is_capturing(status);
}

int cudaStreamGetPriority(void *stream, int *priority)
{
    *priority = 0;
    return SUCCESS;
}

int cudaStreamSynchronize(void *s) { return count_call("sync", "cudaStreamSynchronize"); }
int cudaDeviceSynchronize(void) { return count_call("sync", "cudaDeviceSynchronize"); }
int cudaEventSynchronize(void *e) { return count_call("sync", "cudaEventSynchronize"); }
int cuStreamSynchronize(void *s) { return count_call("sync", "cuStreamSynchronize"); }
int cuCtxSynchronize(void) { return count_call("sync", "cuCtxSynchronize"); }

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
