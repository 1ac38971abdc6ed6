/* The CUDA driver of the fake device. torch opens libcuda.so.1 late, for contexts and for kernels that are compiled while
   the program runs; the library has that name, so it finds these. Declared without their arguments, of which none is read,
   and so without cuda.h. */

#define _GNU_SOURCE
#include <dlfcn.h>

#include "fake_device.h"

#define SYMBOL_NOT_FOUND 500
#define SUCCEEDS(name) \
    int name(void) { return 0; }

SUCCEEDS(cuInit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuDeviceGet)
SUCCEEDS(cuDeviceGetAttribute)
SUCCEEDS(cuDevicePrimaryCtxRetain)
SUCCEEDS(cuFuncGetAttribute)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLinkAddData_v2)
SUCCEEDS(cuLinkComplete)
SUCCEEDS(cuLinkCreate_v2)
SUCCEEDS(cuModuleGetFunction)
SUCCEEDS(cuModuleLoad)
SUCCEEDS(cuModuleLoadData)
SUCCEEDS(cuModuleLoadDataEx)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCEEDS(cuPointerGetAttribute)
SUCCEEDS(cuTensorMapEncodeTiled)

int cuLaunchKernel(void) {
    count(counted_launches, 1);
    return setting(cuda_fails, 0);
}

int cuLaunchCooperativeKernel(void) {
    return cuLaunchKernel();
}

int cuCtxGetCurrent(void **context) {
    *context = control();
    return 0;
}

/* A device has a context once something was done with it. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = control()->touched[device] > 0;
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "an error of the fake driver";
    return 0;
}

int cuDriverGetVersion(int *version) {
    extern int cudaDriverGetVersion(int *); /* of cuda_runtime.c */
    return cudaDriverGetVersion(version);
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? 0 : SYMBOL_NOT_FOUND;
}
