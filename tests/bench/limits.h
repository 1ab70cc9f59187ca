// What this machine can do, measured beside the figures that are judged by it: shared machines swing by a factor of two within minutes, so only
// ratios within one run count.
// Room: tests/bench. Threads: the given pool's.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/device/host/host_device.h"
#include "common/device/host/limits.h"

namespace hearth {

double Median(std::vector<double> values);

// Steps, each with a plain read of as many bytes right behind it; medians.
class StepsBesideReads {
 public:
  void Add(double step_seconds, double read_seconds, double bytes) {
    seconds_.push_back(step_seconds);
    bytes_.push_back(bytes);
    read_rates_.push_back(bytes / read_seconds);
    ratios_.push_back(read_seconds / step_seconds);
  }
  double seconds() const { return Median(seconds_); }
  double bytes() const { return Median(bytes_); }
  double rate() const { return bytes() / seconds(); }
  double read_rate() const { return Median(read_rates_); }
  double of_read() const { return Median(ratios_); }  // 1: as fast as the read

 private:
  std::vector<double> seconds_, bytes_, read_rates_, ratios_;
};

// --threads, --terms, --kv (bf16 or fp8), --spin-us and --isa, which every bench of a host device has; false for other names and for values that mean
// nothing.
bool TakeDeviceFlag(std::string_view name, const char* value, HostDeviceOptions* options);

// Walks a bench's command line: `--name value` goes to `take`, then to TakeDeviceFlag; a word without dashes is the model's directory, where the
// bench has one. False after saying on stderr what is wrong.
bool TakeFlags(int argc, char** argv, HostDeviceOptions* options, std::string* model_dir,
               absl::FunctionRef<bool(const std::string& name, const char* value)> take);

}  // namespace hearth
