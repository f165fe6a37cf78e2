// A pointer that a helper reads or writes kBytes at once. Trace takes the number from the call's name for a guard.
#pragma once

namespace tk {

template <int kBytes, class T>
__device__ __forceinline__ T* aligned(T* pointer) {
  return static_cast<T*>(__builtin_assume_aligned(pointer, kBytes));
}

}  // namespace tk
