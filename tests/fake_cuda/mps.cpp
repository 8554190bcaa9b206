// An MPS device that is not there, as device.cpp has a CUDA device.
#include <ATen/detail/MPSHooksInterface.h>

#include "guard.h"

namespace absent {

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

extern "C" void take_over() {
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::MPS, new absent::Guard<c10::DeviceType::MPS>());
}
