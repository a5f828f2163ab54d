/* cuBLAS: GEMMs by dtype and shape, column-major as cuBLAS sees them. */
#include <stdio.h>
#include <stdlib.h>
#include "stub.h"

static int gemm(int dtype, size_t m, size_t n, size_t k)
{
    const char *text = dtype == CUDA_R_32F ? "float32" : dtype == CUDA_R_64F ? "float64"
                       : dtype == CUDA_R_16BF ? "bfloat16" : dtype == CUDA_R_8F_E4M3 ? "float8"
                       : dtype == CUDA_R_8F_E5M2 ? "float8_e5m2" : "other";
    char name[96];
    snprintf(name, sizeof name, "%s %zux%zux%zu", text, m, n, k);
    return count_call(is_capturing() ? "captured gemm" : "gemm", name);
}

int cublasCreate_v2(void **handle) { return create(handle); }
int cublasLtCreate(void **handle) { return create(handle); }
int cublasLtMatmulDescCreate(void **description) { return create(description); }
int cublasLtMatmulPreferenceCreate(void **preference) { return create(preference); }
size_t cublasLtGetVersion(void) { return 130000; }

static int mode(int *value)
{
    *value = 0;
    return SUCCESS;
}

int cublasGetPointerMode_v2(void *handle, int *value) { return mode(value); }
int cublasGetMathMode(void *handle, int *value) { return mode(value); }

struct layout { int dtype; size_t rows, columns; };

int cublasLtMatrixLayoutCreate(struct layout **layout, int dtype, size_t rows, size_t columns)
{
    *layout = malloc(sizeof **layout);
    **layout = (struct layout){dtype, rows, columns};
    return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(struct layout *layout)
{
    free(layout);
    return SUCCESS;
}

int cublasLtMatmul(void *handle, void *description, void *alpha, void *a, struct layout *a_layout,
                   void *b, struct layout *b_layout, void *beta, void *c, struct layout *c_layout,
                   void *d, struct layout *d_layout)
{
    size_t m = d_layout->rows;
    size_t k = m ? a_layout->rows * a_layout->columns / m : 0;
    return gemm(a_layout->dtype, m, d_layout->columns, k);
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c,
                                   void *d, void *preference, int n_wanted, void *results,
                                   int *n_found)
{
    *n_found = 1;
    return SUCCESS;
}

int cublasGemmEx(void *handle, int ta, int tb, int m, int n, int k, void *alpha, void *a, int dtype)
{
    return gemm(dtype, m, n, k);
}

int cublasGemmStridedBatchedEx(void *handle, int ta, int tb, int m, int n, int k, void *alpha,
                               void *a, int dtype)
{
    return gemm(dtype, m, n, k);
}

int cublasSgemm_v2(void *handle, int ta, int tb, int m, int n, int k)
{
    return gemm(CUDA_R_32F, m, n, k);
}

int cublasDgemm_v2(void *handle, int ta, int tb, int m, int n, int k)
{
    return gemm(CUDA_R_64F, m, n, k);
}
