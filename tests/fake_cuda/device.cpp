// A CUDA device that is not there: a guard and hooks that do nothing, so that autograd accepts fake tensors of device
// cuda in a CPU build of torch. Loaded before torch is imported, because torch looks the hooks up once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/library.h>

#include "guard.h"

namespace absent {

c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard<c10::DeviceType::CUDA>());

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
};

// Never called: without a kernel of CUDA, torch would take it for a composition of seven operations.
at::Tensor silu_backward(const at::Tensor& gradient, const at::Tensor&) { return gradient; }

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("silu_backward", silu_backward); }

}  // namespace absent

using absent::Hooks;
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::absent::Hooks)
}
