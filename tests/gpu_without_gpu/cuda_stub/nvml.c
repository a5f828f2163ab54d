/* NVML: no fabric and no other process. PyTorch loads it by name to count devices and to map memory. */
#include "stub.h"

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = setting("GPU_STUB_COUNT", 1);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count)
{
    *count = 0;
    return SUCCESS;
}
