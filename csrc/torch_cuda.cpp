// What the CUDA library hands to its kernels: torch's current stream, memory and pinned buffers.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <memory>

#include "torch_ops.h"
#include "torch_ops_checks.h"

// In libtorch_cuda.so only. Weak, so that this library also links and loads beside a CPU torch.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace wim::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Device;

// Lives as long as the call's Context. Torch's allocators reuse memory in stream order, so what the
// enqueued kernels use may be given back as soon as they are enqueued.
struct CallState {
  explicit CallState(int32_t index)
      : guard(index), device(torch::headeronly::DeviceType::CUDA, index) {}
  torch::stable::accelerator::DeviceGuard guard;
  Device device;
  std::vector<Tensor> memory;

  Tensor bytes(int64_t count, Device where, bool pinned) {
    return torch::stable::empty({count}, ScalarType::Byte, std::nullopt, where, pinned);
  }

  void* scratch(int64_t count) {
    memory.push_back(bytes(count, device, false));
    return memory.back().data_ptr();
  }

  // Through pinned memory, whose reuse torch delays until the copy is done: neither waits for the
  // device.
  const void* upload(const void* host, int64_t count) {
    if (count == 0) return nullptr;
    const Tensor staging = bytes(count, Device(torch::headeronly::DeviceType::CPU), true);
    std::memcpy(staging.mutable_data_ptr(), host, count);
    void* target = scratch(count);
    torch::stable::copy_(memory.back(), staging, /*non_blocking=*/true);
    return target;
  }
};

CUstream_st* current_stream(int32_t device_index) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream == nullptr ||
      aoti_torch_get_current_cuda_stream(device_index, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("wim_ext cannot get torch's current CUDA stream: torch has no CUDA");
  }
  return static_cast<CUstream_st*>(stream);
}

}  // namespace

void on_device(const char* name, const Tensor& tensor) {
  if (!tensor.is_cuda()) {
    checks::value_error(name, " must be on a cuda device, found ", checks::device_text(tensor));
  }
}

backend::Context context(const Tensor& tensor) {
  const int32_t device_index = tensor.get_device_index();
  const auto state = std::make_shared<CallState>(device_index);
  backend::Context result;
  result.stream = current_stream(device_index);
  result.num_threads = backend::busy_blocks();
  result.scratch = [state](int64_t bytes) { return state->scratch(bytes); };
  result.upload = [state](const void* host, int64_t bytes) { return state->upload(host, bytes); };
  return result;
}

}  // namespace wim::ops
