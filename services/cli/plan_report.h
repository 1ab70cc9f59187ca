// What `hearth plan` found, as tables for people and as JSON for programs.
// Room: services/cli. May touch: all of common.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "common/plan/decode_plan.h"

namespace hearth {

struct PlanReport {
  std::string model;     // as asked for
  std::string hardware;  // the profile's name, with what was changed
  HardwareProfile profile;
  PlannedModel planned;

  // Of the device that decodes: the first GPU, or DRAM.
  uint64_t workspace_bytes = 0;
  double kv_bytes_per_token = 0;
  std::vector<DecodePoint> decode;

  // What a GPU has left for KV beside weights, buffers and the driver, in tokens; negative: not even those fit. Without a GPU: what DRAM has left
  // beside the image.
  double KvTokens() const;
};

void PrintReport(const PlanReport& report, std::ostream& out);
std::string ReportJson(const PlanReport& report);

}  // namespace hearth
