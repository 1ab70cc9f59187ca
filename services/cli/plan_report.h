// What `hearth plan` found, as tables for people and as JSON for programs.
// Room: services/cli. May touch: all of common.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "common/plan/decode_plan.h"
#include "common/plan/prefill_plan.h"
#include "common/plan/together_plan.h"
#include "common/roofline/hardware_profile.h"

namespace hearth {

struct PlanReport {
  std::string model;     // as asked for
  std::string hardware;  // the profile's name, with what was changed
  HardwareProfile profile;
  PlannedModel planned;
  std::vector<std::string> notes;  // where the plan is of something else than what was asked for

  // Of the device that decodes: the first GPU, or DRAM.
  uint64_t workspace_bytes = 0;
  double kv_bytes_per_token = 0;
  std::vector<DecodePoint> decode;

  // A prompt's first token comes a decode step of one stream after its prefill.
  struct Prompt {
    PrefillPoint prefill;
    double first_token_s = 0;
  };
  std::vector<Prompt> prompts;
  int64_t pass_rows = 0, chunk_rows = 0;  // of the streamed path; no rows: it is not there
  std::string not_streamed;               // why
  int64_t sharing_gpus = 0;               // of the shared path; 0: it is not there
  ExpertExchange exchange = ExpertExchange::kSmallEp;
  ExchangeShape exchange_shape;
  std::vector<TogetherPoint> together;  // none: there are no two GPUs, or the model takes no such prompts

  // Of the routed experts, what at least must lie on disk for the image to fit into memory; 0: it fits; more than 1: nothing helps.
  double OnDiskShare() const;

  // Prompts of so many tokens and more are faster streamed, by the lengths that were run, between which it is interpolated; none: never.
  std::optional<double> CrossoverTokens() const;

  // What a GPU has left for KV beside weights, buffers and the driver, in tokens; negative: not even those fit. Without a GPU: what DRAM has left
  // beside the image.
  double KvTokens() const;
};

void PrintReport(const PlanReport& report, std::ostream& out);
std::string ReportJson(const PlanReport& report);

}  // namespace hearth
