/* Graphs: while a stream captures, all streams do; kernels are then captured, not launched. */
#include "stub.h"

enum { NOT_CAPTURING = 0, CAPTURING = 1 };
static unsigned long long capture;
static int status = NOT_CAPTURING;

int is_capturing(void) { return status == CAPTURING; }

int cudaStreamBeginCapture(void *stream, int mode)
{
    capture++;
    status = CAPTURING;
    return SUCCESS;
}

int cudaStreamEndCapture(void *stream, void **graph)
{
    status = NOT_CAPTURING;
    *graph = new_handle();
    return SUCCESS;
}

int cudaStreamIsCapturing(void *stream, int *found)
{
    *found = status;
    return SUCCESS;
}

int cuStreamIsCapturing(void *stream, int *found) { return cudaStreamIsCapturing(stream, found); }

int cudaStreamGetCaptureInfo(void *stream, int *found, unsigned long long *id)
{
    if (id)
        *id = capture;
    return cudaStreamIsCapturing(stream, found);
}

int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }

int cudaGraphGetNodes(void *graph, void **nodes, size_t *n_nodes)
{
    *n_nodes = 1;
    return SUCCESS;
}

int cudaGraphInstantiate(void **executable) { return create(executable); }
int cudaGraphInstantiateWithFlags(void **executable) { return create(executable); }
int cudaGraphLaunch(void *executable, void *stream) { return count_call("graph", "launch"); }
