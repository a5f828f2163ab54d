/* A GPU that is not there. This library answers the calls that PyTorch's CUDA build makes of the
 * CUDA runtime, the driver, cuBLAS and NCCL, counts them by name, and does no work.
 *
 * Device memory is address space without pages, so that the host can neither read nor write it, as
 * on a GPU. Every copy from it yields zeros. Sizes, limits and handles are those of a Hopper GPU;
 * values and times are not computed.
 *
 * stub_library.py compiles it. Functions that PyTorch's libraries need and that no file defines are
 * generated: they count the call and return success.
 */
#include <stddef.h>
#include <stdint.h>
#include "driver_types.h"
#include "library_types.h"

#define MIB ((size_t)1 << 20)
enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };
enum { N_MULTIPROCESSORS = 132, MAX_THREADS = 1024 };
enum { SHARED_PER_BLOCK = 49152, SHARED_OPT_IN = 232448, SHARED_PER_MULTIPROCESSOR = 233472 };

/* counters.c: calls and bytes by kind and name. Both return SUCCESS. */
int count_call(const char *kind, const char *name);
int count_bytes(const char *kind, const char *name, size_t bytes);
void *new_handle(void);

/* graphs.c */
int is_capturing(void);

/* memory.c */
size_t device_bytes(void);
void *map_region(size_t size, int is_host);

/* device.c */
size_t setting(const char *name, size_t default_value);
int create(void **handle);
