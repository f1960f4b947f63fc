// A device for tests that is not the CPU: "second". Its memory is the host's, so that every operation can fall back to
// the CPU's kernel and give the same bits, but its tensors do not meet the CPU's, as a GPU's do not. It counts how often
// a program would wait for a GPU.
//
// The extension point is PrivateUse1: https://docs.pytorch.org/tutorials/advanced/privateuseone.html

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <set>
#include <string>

namespace {

constexpr auto kSecond = c10::DeviceType::PrivateUse1;
const c10::Device second(kSecond, 0);

std::atomic<int64_t> waits{0};
thread_local int kernels = 0;  // that are running: copies are those of the fallback then

struct InKernel {
  InKernel() { ++kernels; }
  ~InKernel() { --kernels; }
};

void wait() {
  if (kernels == 0) ++waits;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, second};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
};
Memory memory;
REGISTER_ALLOCATOR(kSecond, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSecond; }
  c10::Device exchangeDevice(c10::Device) const override { return second; }
  c10::Device getDevice() const override { return second; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, second); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, second); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// A tensor of the CPU with the same bytes as one of the device.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto* owner = new c10::Storage(tensor.storage());
  auto release = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::Storage bytes(
      c10::Storage::use_byte_size_t(), owner->nbytes(),
      c10::DataPtr(owner->mutable_data(), owner, release, at::kCPU), nullptr, false);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return host;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.is_privateuseone() ? !to.is_privateuseone() : !non_blocking) wait();
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar number(const at::Tensor& tensor) {
  wait();
  return on_host(tensor).item();
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto bytes = (tensor.storage_offset() + c10::multiply_integers(size)) * tensor.itemsize();
  if (bytes > storage->nbytes()) {
    auto larger = memory.allocate(bytes);
    memory.copy_data(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

// CUDA waits where a shape depends on data.
const std::set<std::string> shaped_by_data = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal", "aten::repeat_interleave"};

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  bool here = false, elsewhere = false;
  if (shaped_by_data.count(name)) wait();
  auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    here |= tensor.is_privateuseone();
    elsewhere |= tensor.is_cpu() && tensor.dim() > 0;  // a single number of the CPU may meet any device
  };
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) see(argument.toTensor());
    if (argument.isTensorList()) for (const at::Tensor& each : argument.toTensorList()) see(each);
    // Lists with gaps are indices, which CUDA takes from the CPU as well; those by a mask have been to nonzero.
  }
  TORCH_CHECK(!(here && elsewhere), "tensors on two devices in ", name);
  if (name == "aten::cumsum" && torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor().is_floating_point())
    at::globalContext().alertNotDeterministic("cumsum");  // as CUDA does
  InKernel inside;
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", number);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", [](at::Tensor& tensor, at::Storage storage) -> at::Tensor& {
    const auto length = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
    return set_storage(tensor, std::move(storage), 0, {length}, {1});
  });
  library.impl("resize_", resize);
  library.impl("view", [](const at::Tensor& tensor, c10::SymIntArrayRef size) {
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
  });
  library.impl(
      "as_strided",
      [](const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
         std::optional<c10::SymInt> offset) {
        auto at = offset.has_value() ? std::make_optional(offset->expect_int()) : std::nullopt;
        return at::native::as_strided_tensorimpl(
            tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
      });
  library.impl(
      "_reshape_alias", [](const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
        return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
      });
  library.impl("unfold", [](const at::Tensor& tensor, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(tensor, dimension, size, step);
  });
  // The plain one; the fused kernels ask for streams.
  library.impl(
      "_fused_sdp_choice",
      [](const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
         std::optional<double>, bool) -> int64_t { return 0; });
}

TORCH_LIBRARY(second, library) {
  library.def("waits() -> int", []() -> int64_t { return waits; });
}
