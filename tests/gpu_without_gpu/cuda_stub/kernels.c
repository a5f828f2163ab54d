/* Kernels: a name for each address or handle, counted where it is launched. */
#include <pthread.h>
#include <string.h>
#include "stub.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

enum { MAX_KERNELS = 1 << 18 };
static struct kernel {
    const void *function;
    const char *name;
} kernels[MAX_KERNELS];

static struct kernel *kernel_slot(const void *function)
{
    size_t slot = ((uintptr_t)function >> 4) % MAX_KERNELS;
    while (kernels[slot].function && kernels[slot].function != function)
        slot = (slot + 1) % MAX_KERNELS;
    return &kernels[slot];
}

static void name_kernel(const void *function, const char *name)
{
    pthread_mutex_lock(&mutex);
    struct kernel *kernel = kernel_slot(function);
    kernel->name = strdup(name);
    kernel->function = function;
    pthread_mutex_unlock(&mutex);
}

static int launch(const void *function)
{
    const char *name = kernel_slot(function)->name;
    return count_call(is_capturing() ? "captured kernel" : "kernel", name ? name : "unnamed");
}

static void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle[4];
    return handle;
}

int __cudaRegisterFunction(void **handle, const char *function, char *device_function,
                           const char *name, int limit, void *a, void *b, void *c, void *d, int *e)
{
    name_kernel(function, name);
    return SUCCESS;
}

int __cudaInitModule(void *handle) { return 1; }
int __cudaRegisterVar(void) { return SUCCESS; }

int __cudaGetKernel(const void **kernel, const void *function)
{
    *kernel = function;
    return SUCCESS;
}

typedef struct { unsigned x, y, z; } dim;
static __thread struct { dim grid, block; size_t shared; void *stream; } configuration;

unsigned __cudaPushCallConfiguration(dim grid, dim block, size_t shared, void *stream)
{
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return SUCCESS;
}

int __cudaPopCallConfiguration(dim *grid, dim *block, size_t *shared, void **stream)
{
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *stream = configuration.stream;
    return SUCCESS;
}

int cudaLaunchKernel(const void *function) { return launch(function); }
int __cudaLaunchKernel(const void *function) { return launch(function); }
int cudaLaunchCooperativeKernel(const void *function) { return launch(function); }
int cudaLaunchKernelExC(const void *config, const void *function) { return launch(function); }
int cuLaunchKernel(void *function) { return launch(function); }
int cuLaunchKernelEx(const void *config, void *function) { return launch(function); }
int cuLaunchCooperativeKernel(void *function) { return launch(function); }

static int load_module(void **module)
{
    *module = new_handle();
    return SUCCESS;
}

int cuModuleLoad(void **module) { return load_module(module); }
int cuModuleLoadData(void **module) { return load_module(module); }
int cuModuleLoadDataEx(void **module) { return load_module(module); }
int cuLibraryLoadData(void **library) { return load_module(library); }

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = new_handle();
    name_kernel(*function, name);
    return SUCCESS;
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name)
{
    return cuModuleGetFunction(kernel, library, name);
}

int cuKernelGetFunction(void **function, void *kernel)
{
    *function = kernel;
    return SUCCESS;
}

int cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = MAX_THREADS;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    attributes->maxDynamicSharedSizeBytes = SHARED_PER_BLOCK;
    return SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, void *function)
{
    enum { MAX_THREADS_PER_BLOCK = 0, NUM_REGS = 4 };
    *value = attribute == MAX_THREADS_PER_BLOCK ? MAX_THREADS : attribute == NUM_REGS ? 64 : 0;
    return SUCCESS;
}

static int occupancy(int *blocks)
{
    *blocks = 2;
    return SUCCESS;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { return occupancy(n); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n) { return occupancy(n); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { return occupancy(n); }

int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config)
{
    *clusters = N_MULTIPROCESSORS / 2;
    return SUCCESS;
}
