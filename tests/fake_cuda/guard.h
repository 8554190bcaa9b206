// The guard of a device that is not there: it does nothing, and has one stream.
#pragma once
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace absent {

template <c10::DeviceType type>
struct Guard final : c10::impl::NoOpDeviceGuardImpl<type> {
  c10::Device getDevice() const override { return device(); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

 private:
  static c10::Device device() noexcept { return {type, 0}; }
  static c10::Stream stream() noexcept { return c10::Stream(c10::Stream::DEFAULT, device()); }
};

}  // namespace absent
