// Controls for the race checker, without a race. 128 threads write what 128 others read, behind a barrier that orders
// the two. Those that write met at a barrier of their own before, and the others did not: see sanitizer.py.
// Built with nvcc -lineinfo; ends with 0 if the right numbers were read.

#include <cstdint>
#include <cstdio>

#define BAR_SYNC(id, threads) asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory")
#define BAR_ARRIVE(id, threads) asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory")

enum { ALONE = 2, HANDED = 14 };  // named barriers

__device__ void meet_alone() {
  for (int i = 0; i < 9; ++i) BAR_SYNC(ALONE, 128);
}

extern "C" __global__ void named_barrier_kernel(int *out) {
  __shared__ int values[128];
  int thread = threadIdx.x % 128;
  if (threadIdx.x < 128) {
    meet_alone();
    values[thread] = thread;
    BAR_ARRIVE(HANDED, 256);
  } else {
    BAR_SYNC(HANDED, 256);
    out[thread] = values[127 - thread];
  }
}

// One thread arrives for all that wrote, once they have met: so Triton has it.
extern "C" __global__ void mbarrier_kernel(int *out) {
  __shared__ int values[128];
  __shared__ uint64_t barrier;
  uint32_t handed = (uint32_t)__cvta_generic_to_shared(&barrier);
  int thread = threadIdx.x % 128;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(handed) : "memory");
  __syncthreads();
  if (threadIdx.x < 128) {
    meet_alone();
    values[thread] = thread;
    BAR_SYNC(ALONE, 128);
    if (thread == 0)
      asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(handed) : "memory");
  } else {
    asm volatile(
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; @!done bra WAIT; }" ::"r"(handed)
        : "memory");
    out[thread] = values[127 - thread];
  }
}

int main() {
  int *out, found[256], wrong = 0;
  cudaMalloc(&out, sizeof found);
  named_barrier_kernel<<<1, 256>>>(out);
  mbarrier_kernel<<<1, 256>>>(out + 128);
  cudaMemcpy(found, out, sizeof found, cudaMemcpyDeviceToHost);
  for (int i = 0; i < 256; ++i) wrong += found[i] != 127 - i % 128;
  printf("%s, %d wrong\n", cudaGetErrorString(cudaGetLastError()), wrong);
  return wrong > 0;
}
