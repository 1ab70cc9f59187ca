#include "tests/bench/limits.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "common/kernels/kernels.h"

namespace hearth {

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

bool TakeDeviceFlag(std::string_view name, const char* value, HostDeviceOptions* options) {
  if (name == "--threads") {
    options->num_threads = std::atoi(value);
  } else if (name == "--terms") {
    options->activation_terms = std::atoi(value);
  } else if (name == "--spin-us") {
    options->spin_ns = 1000 * std::atol(value);
  } else if (name == "--kv") {
    options->kv_dtype = std::string_view(value) == "fp8" ? DType::kF8E4M3 : DType::kBF16;
    return options->kv_dtype == DType::kF8E4M3 || std::string_view(value) == "bf16";
  } else if (name == "--isa") {
    options->isa = IsaFromName(value);
    if (options->isa == Isa::kAmx) options->numerics = Numerics::kFast;
    return options->isa.has_value();
  } else {
    return false;
  }
  return true;
}

bool TakeFlags(int argc, char** argv, HostDeviceOptions* options, std::string* model_dir,
               absl::FunctionRef<bool(const std::string& name, const char* value)> take) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0 && model_dir != nullptr) {
      *model_dir = name;
      continue;
    }
    if (i + 1 == argc) {
      std::fprintf(stderr, "%s wants a value\n", name.c_str());
      return false;
    }
    const char* value = argv[++i];
    if (!take(name, value) && !TakeDeviceFlag(name, value, options)) {
      std::fprintf(stderr, "unknown flag or value: %s %s\n", name.c_str(), value);
      return false;
    }
  }
  return true;
}

}  // namespace hearth
