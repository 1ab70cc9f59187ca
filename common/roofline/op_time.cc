#include "common/roofline/op_time.h"

namespace hearth {

OpTime TimeOnGpu(const GpuProfile& gpu, const OpCost& cost) {
  return {.fixed_s = gpu.op_us * 1e-6, .compute_s = cost.flops / gpu.FlopsPerSecond(), .memory_s = cost.bytes() / gpu.BytesPerSecond()};
}

OpTime TimeOnCpu(const CpuProfile& cpu, const OpCost& cost) {
  const double activations = cost.activation_bytes > cpu.CacheBytes() ? cost.activation_bytes : 0;
  const double bytes = cost.weight_bytes + cost.kv_bytes + activations;
  return {.fixed_s = cpu.op_us * 1e-6,
          .compute_s = cost.flops / cpu.FlopsPerSecond(),
          .memory_s = bytes / cpu.BytesPerSecond(),
          .asking_s = bytes / cpu.AskedBytesPerSecond()};
}

double SecondsOnLink(const GpuProfile& gpu, double bytes) { return bytes / gpu.LinkBytesPerSecond(); }

}  // namespace hearth
