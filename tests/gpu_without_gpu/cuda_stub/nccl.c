/* NCCL: no rank receives anything. */
#include <string.h>
#include "stub.h"

enum { NCCL_VERSION = 22809 };

static int communicator(void **handle, const char *name)
{
    *handle = new_handle();
    return count_call("nccl", name);
}

int ncclCommInitRank(void **c) { return communicator(c, "ncclCommInitRank"); }
int ncclCommInitRankConfig(void **c) { return communicator(c, "ncclCommInitRankConfig"); }
int ncclCommInitRankScalable(void **c) { return communicator(c, "ncclCommInitRankScalable"); }

int ncclCommSplit(void *parent, int color, int key, void **c)
{
    return communicator(c, "ncclCommSplit");
}

int ncclGetVersion(int *value)
{
    *value = NCCL_VERSION;
    return SUCCESS;
}

int ncclGetUniqueId(char *id)
{
    memset(id, 1, 128);
    return SUCCESS;
}

int ncclCommGetAsyncError(void *c, int *error)
{
    *error = SUCCESS;
    return SUCCESS;
}


int ncclCommCount(void *c, int *count)
{
    *count = setting("GPU_STUB_COUNT", 1);
    return SUCCESS;
}

int cudaGetDevice(int *device);
int ncclCommUserRank(void *c, int *rank) { return cudaGetDevice(rank); }

const char *ncclGetErrorString(int error) { return "an error of the stub"; }
const char *ncclGetLastError(void *c) { return ""; }
