// The launchers and kernels of csrc/cuda as a C library for ctypes. "Device" memory is heap memory
// that starts as NaN, and an upload is a copy, so a kernel that followed a host pointer's content
// too late, or read scratch it never wrote, would be seen.
#include <cstring>
#include <memory>

#include "cuda/attention.cu"
#include "cuda/cache_ops.cu"

namespace {

using wim::cuda::Context;

class Emulation {
 public:
  Emulation() {
    context_.scratch = [this](int64_t bytes) {
      memory_.emplace_back(new char[bytes]);
      return std::memset(memory_.back().get(), 0xff, bytes);
    };
    context_.upload = [this](const void* host, int64_t bytes) -> const void* {
      return bytes == 0 ? nullptr : std::memcpy(context_.scratch(bytes), host, bytes);
    };
  }
  const Context& context() const { return context_; }

 private:
  Context context_;
  std::vector<std::unique_ptr<char[]>> memory_;
};

}  // namespace

extern "C" {

void emulate_order(bool reversed, unsigned grid) {
  last_thread_first = reversed, largest_grid = grid;
}
// The tests' mirror of a struct has the same size.
int64_t emulated_size(int which) {
  const int64_t sizes[] = {sizeof(wim::AppendKvParams), sizeof(wim::PageShape),
                           sizeof(wim::MergeStatesParams), sizeof(wim::AttentionParams)};
  return sizes[which];
}
void emulated_attention(const wim::AttentionParams* params) {
  wim::cuda::paged_attention(*params, Emulation().context());
}
void emulated_append_kv(const wim::AppendKvParams* params) {
  wim::cuda::append_kv(*params, Emulation().context());
}
void emulated_merge_states(const wim::MergeStatesParams* params) {
  wim::cuda::merge_states(*params, Emulation().context());
}
void emulated_copy_pages(const wim::PageShape* caches, int64_t num_caches, const int64_t* src,
                         const int64_t* dst, int64_t count) {
  const std::vector<wim::PageShape> shapes(caches, caches + num_caches);
  wim::cuda::copy_pages(shapes, src, dst, count, Emulation().context());
}
}
