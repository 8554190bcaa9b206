// A CUDA device that is not there: a guard and hooks that do nothing, so that autograd accepts fake tensors of device
// cuda without a driver. Loaded before torch is imported, because torch looks the hooks up once.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>

#include "guard.h"

namespace absent {

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
  bool compiledWithCuDNN() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
};

// The kernel of attention that a layout allows: 0 math, 1 flash, 2 memory-efficient. torch's own choice asks the driver.
int64_t attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  for (const auto& each : {q, k, v})
    if (each.stride(-1) != 1) return 0;
  return q.scalar_type() == at::kFloat ? 2 : 1;
}

}  // namespace absent

using absent::Hooks;
namespace at {
// Preferred to the hooks of a CUDA build, which ask the driver.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, ::absent::Hooks)
}

// Called once torch is imported, as a CUDA build of it brings a guard and a choice of its own.
extern "C" void take_over() {
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new absent::Guard<c10::DeviceType::CUDA>());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&absent::attention_kernel);
}
