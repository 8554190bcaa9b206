// An MPS device that is not there, as device.cpp has a CUDA device.
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace absent {

const c10::Device kDevice{c10::DeviceType::MPS, 0};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS> {
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

 private:
  static c10::Stream stream() noexcept { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};

c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::MPS, new Guard());

struct Hooks : at::MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace absent

using absent::Hooks;
namespace at {
C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, ::absent::Hooks)
}
