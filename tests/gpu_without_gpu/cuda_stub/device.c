/* The device: its properties, contexts and errors. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "stub.h"

enum { CUDA_VERSION = 13000, MAX_GRID_YZ = 65535 };

size_t setting(const char *name, size_t default_value)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : default_value;
}

static __thread int current_device;

static int device_attribute(int attribute)
{
    static const int values[128] = {
        [cudaDevAttrMaxThreadsPerBlock] = MAX_THREADS,
        [cudaDevAttrMaxBlockDimX] = MAX_THREADS,
        [cudaDevAttrMaxBlockDimY] = MAX_THREADS,
        [cudaDevAttrMaxBlockDimZ] = 64,
        [cudaDevAttrMaxGridDimX] = 2147483647,
        [cudaDevAttrMaxGridDimY] = MAX_GRID_YZ,
        [cudaDevAttrMaxGridDimZ] = MAX_GRID_YZ,
        [cudaDevAttrMaxSharedMemoryPerBlock] = SHARED_PER_BLOCK,
        [cudaDevAttrTotalConstantMemory] = 65536,
        [cudaDevAttrWarpSize] = 32,
        [cudaDevAttrMaxPitch] = 2147483647,
        [cudaDevAttrMaxRegistersPerBlock] = 65536,
        [cudaDevAttrClockRate] = 1980000,
        [cudaDevAttrMultiProcessorCount] = N_MULTIPROCESSORS,
        [cudaDevAttrConcurrentKernels] = 1,
        [cudaDevAttrMemoryClockRate] = 3201000,
        [cudaDevAttrGlobalMemoryBusWidth] = 6144,
        [cudaDevAttrL2CacheSize] = 62914560,
        [cudaDevAttrMaxThreadsPerMultiProcessor] = 2048,
        [cudaDevAttrAsyncEngineCount] = 3,
        [cudaDevAttrUnifiedAddressing] = 1,
        [cudaDevAttrComputeCapabilityMajor] = 9,
        [cudaDevAttrStreamPrioritiesSupported] = 1,
        [cudaDevAttrMaxSharedMemoryPerMultiprocessor] = SHARED_PER_MULTIPROCESSOR,
        [cudaDevAttrMaxRegistersPerMultiprocessor] = 65536,
        [cudaDevAttrManagedMemory] = 1,
        [cudaDevAttrCooperativeLaunch] = 1,
        [cudaDevAttrMaxSharedMemoryPerBlockOptin] = SHARED_OPT_IN,
        [102] = 1, /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
        [cudaDevAttrMaxBlocksPerMultiprocessor] = 32,
        [cudaDevAttrMemoryPoolsSupported] = 1,
        [cudaDevAttrClusterLaunch] = 1,
    };
    return attribute < 128 ? values[attribute] : 0;
}

static int device_count(int *count)
{
    *count = setting("GPU_STUB_COUNT", 1);
    return SUCCESS;
}

int cudaGetDeviceCount(int *count) { return device_count(count); }
int cuDeviceGetCount(int *count) { return device_count(count); }

int cudaGetDevice(int *device)
{
    *device = current_device;
    return SUCCESS;
}

int cudaSetDevice(int device)
{
    current_device = device;
    return SUCCESS;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = device_attribute(attribute);
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = device_attribute(attribute);
    return SUCCESS;
}

int cuDeviceGetName(char *name, int size, int device)
{
    const char *text = getenv("GPU_STUB_NAME");
    snprintf(name, size, "%s", text ? text : "NVIDIA H200");
    return SUCCESS;
}

int cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    cuDeviceGetName(properties->name, sizeof properties->name, device);
    properties->totalGlobalMem = device_bytes();
    properties->major = 9;
    properties->multiProcessorCount = N_MULTIPROCESSORS;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = MAX_THREADS;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = MAX_THREADS;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = MAX_GRID_YZ;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->sharedMemPerBlock = SHARED_PER_BLOCK;
    properties->sharedMemPerBlockOptin = SHARED_OPT_IN;
    properties->sharedMemPerMultiprocessor = SHARED_PER_MULTIPROCESSOR;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->l2CacheSize = 62914560;
    properties->totalConstMem = 65536;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
    return SUCCESS;
}

int cudaGetDeviceProperties_v2(struct cudaDeviceProp *properties, int device)
{
    return cudaGetDeviceProperties(properties, device);
}

int cudaDeviceGetPCIBusId(char *text, int size, int device)
{
    snprintf(text, size, "0000:00:0%d.0", device);
    return SUCCESS;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = 1;
    return SUCCESS;
}

static int version(int *value)
{
    *value = CUDA_VERSION;
    return SUCCESS;
}

int cudaDriverGetVersion(int *value) { return version(value); }
int cudaRuntimeGetVersion(int *value) { return version(value); }
int cuDriverGetVersion(int *value) { return version(value); }

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *size, int device)
{
    *size = device_bytes();
    return SUCCESS;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active)
{
    if (flags)
        *flags = 0;
    *is_active = 1;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = (void *)16;
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) { return cuDevicePrimaryCtxRetain(context, 0); }

int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }

const char *cudaGetErrorString(int error)
{
    return error == OUT_OF_MEMORY ? "out of memory" : error ? "error of the stub" : "no error";
}

const char *cudaGetErrorName(int error)
{
    return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : error ? "stub" : "cudaSuccess";
}

int cuGetErrorString(int error, const char **text)
{
    *text = cudaGetErrorString(error);
    return SUCCESS;
}

int cuGetErrorName(int error, const char **text)
{
    *text = cudaGetErrorName(error);
    return SUCCESS;
}

int cudaGetLastError(void) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }

static int succeed(void) { return SUCCESS; }

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                     unsigned long long flags, int *status)
{
    void *found = dlsym(RTLD_DEFAULT, symbol);
    *function = found ? found : (void *)succeed;
    if (status)
        *status = SUCCESS;
    return SUCCESS;
}
