#include "cuda/cache_ops.cuh"

namespace wim::cuda {
namespace {

// Halves the number of elements of the innermost run, where sizes, strides and address allow it.
bool widen(PageShape* shape) {
  const int last = shape->dims - 1;
  if (shape->element_bytes >= 16 || last < 0 || shape->strides[last] != 1) return false;
  bool even = shape->sizes[last] % 2 == 0 && shape->page_stride % 2 == 0 &&
              reinterpret_cast<uintptr_t>(shape->data) % (2 * shape->element_bytes) == 0;
  for (int d = 0; d < last; ++d) even = even && shape->strides[d] % 2 == 0;
  if (!even) return false;
  shape->element_bytes *= 2, shape->sizes[last] /= 2, shape->page_stride /= 2;
  for (int d = 0; d < last; ++d) shape->strides[d] /= 2;
  return true;
}

int64_t elements_of(const PageShape& shape) {
  int64_t elements = 1;
  for (int d = 0; d < shape.dims; ++d) elements *= shape.sizes[d];
  return elements;
}

}  // namespace

void append_kv(const AppendKvParams& params, const Context& context) {
  AppendKvParams on_device = params;
  on_device.slots = static_cast<const int64_t*>(
      context.upload(params.slots, params.key.rows * int64_t{sizeof(int64_t)}));
  const int64_t count = params.key.rows * params.key.heads * (params.key.dim + params.value.dim);
  launch(context, "append_kv", count,
         element_size(params.dtype) == 4 ? append_kv_kernel<uint32_t> : append_kv_kernel<uint16_t>,
         on_device);
}

void copy_pages(const std::vector<PageShape>& caches, const int64_t* src, const int64_t* dst,
                int64_t count, const Context& context) {
  std::vector<PageShape> shapes = caches;
  int64_t elements = 0;
  for (PageShape& shape : shapes) {
    while (widen(&shape)) {
    }
    elements = std::max(elements, elements_of(shape));
  }
  const auto num_caches = static_cast<int64_t>(shapes.size());
  const int64_t ids_bytes = count * int64_t{sizeof(int64_t)};
  const void* device_shapes =
      context.upload(shapes.data(), num_caches * int64_t{sizeof(PageShape)});
  launch(context, "copy_pages", num_caches * count * elements, copy_pages_kernel,
         static_cast<const PageShape*>(device_shapes), num_caches,
         static_cast<const int64_t*>(context.upload(src, ids_bytes)),
         static_cast<const int64_t*>(context.upload(dst, ids_bytes)), count, elements);
}

void merge_states(const MergeStatesParams& params, const Context& context) {
  const int64_t states = params.out.rows * params.out.heads;
  with_element(params.dtype, [&](auto element) {
    launch(context, "merge_states", states * params.out.dim, merge_out_kernel<decltype(element)>,
           params);
  });
  launch(context, "merge_states", states, merge_lse_kernel, params);
}

int busy_blocks() {
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  return multiprocessors;
}

}  // namespace wim::cuda
