// What PyTorch's CPU build lacks to run autograd on tensors of a CUDA device that is not there: a
// device with streams, of which this thread uses one, generators, and the claim to have an
// accelerator.
//
// Loaded before torch: only then do calls within libtorch find `getAccelerator` here, not there.

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kind = c10::DeviceType::CUDA;
thread_local c10::StreamId current = 0;

c10::Device device() { return {kind, 0}; }

c10::Stream stream(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device(), id);
}

// Events are left out on purpose: autograd would ask for them only if it went from one stream to
// another, and then it raises.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = stream(current);
    current = next.id();
    return before;
  }
};

// Keeps its seed on the host, as CUDA's do; nobody draws from it, since no values are there.
struct SeedOnly final : c10::GeneratorImpl {
  SeedOnly() : GeneratorImpl(::device(), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return seed_; }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "nobody sets it"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl&) override { TORCH_CHECK(false, "nobody sets it"); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    TORCH_CHECK(false, "nobody asks for it");
  }

 private:
  SeedOnly* clone_impl() const override { return new SeedOnly(); }
  uint64_t seed_ = 0;
};

// Autograd asks which devices are in use before it has the streams of each wait.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<SeedOnly>();
  }
};

}  // namespace

namespace at {
using ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

#define VISIBLE __attribute__((visibility("default")))

namespace at::accelerator {
VISIBLE std::optional<c10::DeviceType> getAccelerator(bool) { return kind; }
VISIBLE bool isAccelerator(c10::DeviceType type) { return type == kind; }
}  // namespace at::accelerator

extern "C" {
VISIBLE int64_t current_stream() { return current; }
VISIBLE void set_current_stream(int64_t id) { current = id; }
}
