/* The copies of the CUDA runtime on a processor's own memory, with the prototypes of its headers.
 *
 * Built twice by test_cuda_runtime.py: SHIM_VERSION 12080 has the index of the piece that failed,
 * 13000 has not. What it is asked for is done and noted, so that a wrong order of arguments, a wrong
 * width or a wrong layout of the attributes shows up as a wrong byte, or in `last_order`.
 */
#include <stddef.h>
#include <string.h>

typedef int cudaError_t;
typedef void *cudaStream_t;

struct cudaMemLocation {
    int type;
    int id;
};

struct cudaMemcpyAttributes {
    int srcAccessOrder;
    struct cudaMemLocation srcLocHint;
    struct cudaMemLocation dstLocHint;
    unsigned int flags;
};

int num_calls, last_order, last_hints, num_errors_taken, driver_version = SHIM_VERSION;
size_t fail_at = (size_t)-1;
cudaStream_t last_stream;

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = SHIM_VERSION;
    return 0;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = driver_version;
    return 0;
}

const char *cudaGetErrorName(cudaError_t error) {
    return error == 1 ? "cudaErrorInvalidValue" : "cudaErrorUnknown";
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == 1 ? "invalid argument" : "unknown error";
}

cudaError_t cudaGetLastError(void) {
    num_errors_taken++;
    return 0;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags) {
    if (flags != 0 || ((size_t)host & 1))
        return 1;
    *device = host;
    return 0;
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                              size_t height, int kind, cudaStream_t stream) {
    num_calls++;
    last_stream = stream;
    if (kind != 4 || width > dpitch || width > spitch)
        return 1;
    for (size_t row = 0; row < height; row++)
        memcpy((char *)dst + row * dpitch, (const char *)src + row * spitch, width);
    return 0;
}

#if SHIM_VERSION < 13000
cudaError_t cudaMemcpyBatchAsync(void **dsts, void **srcs, size_t *sizes, size_t count,
                                 struct cudaMemcpyAttributes *attrs, size_t *attrsIdxs,
                                 size_t numAttrs, size_t *failIdx, cudaStream_t stream) {
#else
cudaError_t cudaMemcpyBatchAsync(void *const *dsts, const void *const *srcs, const size_t *sizes,
                                 size_t count, struct cudaMemcpyAttributes *attrs,
                                 size_t *attrsIdxs, size_t numAttrs, cudaStream_t stream) {
#endif
    num_calls++;
    last_stream = stream;
    if (count == 0 || numAttrs != 1 || attrsIdxs[0] != 0 || stream == NULL)
        return 1;
    last_order = attrs->srcAccessOrder;
    last_hints = attrs->srcLocHint.type | attrs->srcLocHint.id | attrs->dstLocHint.type |
                 attrs->dstLocHint.id | (int)attrs->flags;
    for (size_t i = 0; i < count; i++) {
        if (i == fail_at || sizes[i] == 0) {
#if SHIM_VERSION < 13000
            *failIdx = i;
#endif
            return 1;
        }
        memcpy(dsts[i], srcs[i], sizes[i]);
    }
    return 0;
}
