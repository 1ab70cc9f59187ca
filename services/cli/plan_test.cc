// What `hearth plan` refuses and says, as a user meets it: by exit code and text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/base/process.h"
#include "services/cli/command.h"
#include "services/cli/shipped.h"

namespace hearth {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

struct Ended {
  int code = -1;
  std::string out, err;
};

int RunPlan(std::vector<std::string> args) {
  CLI::App app("hearth");
  int exit_code = -1;
  AddPlan(app, exit_code);
  args.insert(args.begin(), "plan");
  std::reverse(args.begin(), args.end());  // as CLI11 wants them
  app.parse(args);
  return exit_code;
}

Ended Plan(const std::vector<std::string>& args) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Ended ended{.code = RunPlan(args)};
  ended.out = testing::internal::GetCapturedStdout();
  ended.err = testing::internal::GetCapturedStderr();
  return ended;
}

class PlanTest : public ::testing::Test {
 protected:
  PlanTest() {
    std::string dir = testing::TempDir() + "/hearth_plan_test_XXXXXX";
    dir_ = mkdtemp(dir.data());
    const auto file =
        std::find_if(ShippedHardware().begin(), ShippedHardware().end(), [](const ShippedFile& f) { return f.name == "epyc-9355-2x5090"; });
    std::string text(file->text);
    std::ofstream(Path("cpu.toml")) << text.substr(0, text.find("[gpu]"));
  }
  ~PlanTest() override { std::filesystem::remove_all(dir_); }
  std::string Path(const std::string& name) const { return dir_ + "/" + name; }

  // A small model that takes so many tokens.
  std::string Model(int64_t tokens) const {
    const std::string path = Path("config.json");
    std::ofstream(path) << R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 300, "hidden_size": 256,
      "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 64, "kv_lora_rank": 64,
      "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000, "n_routed_experts": 8,
      "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
      "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": false, "max_position_embeddings": )"
                        << tokens << "}";
    return path;
  }

  std::string dir_;
};

TEST_F(PlanTest, LengthsThatTheModelDoesNotTakeAreCutAndTold) {
  const Ended cut =
      Plan({"--model", Model(2048), "--hardware", Path("cpu.toml"), "--context", "512", "4096", "8192", "--prompt", "100", "--batch", "1"});
  EXPECT_EQ(cut.code, kExitOk) << cut.err;
  EXPECT_THAT(cut.out, AllOf(HasSubstr("note: --context 4096, 8192: the model takes 2048 tokens"), HasSubstr("2047 instead"),
                             Not(HasSubstr("note: --prompt"))));
  const Ended all =
      Plan({"--model", Model(2048), "--hardware", "epyc-9355-2x5090", "--context", "4096", "--prompt", "4096", "--batch", "1", "--json"});
  EXPECT_EQ(all.code, kExitOk) << all.err;
  EXPECT_THAT(all.out, AllOf(HasSubstr("\"context\": 2047"), HasSubstr("\"tokens\": 2047"), HasSubstr("2047 instead")));
}

TEST_F(PlanTest, AModelWithoutRoomForAnAnswerIsRefused) {
  for (const std::string& hardware : {Path("cpu.toml"), std::string("epyc-9355-2x5090")}) {
    const Ended ended = Plan({"--model", Model(1), "--hardware", hardware});
    EXPECT_EQ(ended.code, kExitConfig);
    EXPECT_THAT(ended.err, HasSubstr("max_position_embeddings is 1"));
  }
  EXPECT_EQ(Plan({"--model", Model(2), "--hardware", Path("cpu.toml")}).code, kExitOk);
}

TEST_F(PlanTest, TwoPicturesNeedTwoFiles) {
  const Ended same = Plan({"--model", Model(2048), "--hardware", Path("cpu.toml"), "--svg", Path("a.svg"), "--timeline", dir_ + "/./a.svg"});
  EXPECT_EQ(same.code, kExitConfig);
  EXPECT_THAT(same.err, HasSubstr("--svg and --timeline both name"));
  EXPECT_FALSE(std::filesystem::exists(Path("a.svg")));
}

TEST_F(PlanTest, APictureOfAPromptNeedsAGpu) {
  const Ended cpu = Plan({"--model", Model(2048), "--hardware", Path("cpu.toml"), "--picture-of", "prompt", "--svg", Path("a.svg")});
  EXPECT_EQ(cpu.code, kExitConfig);
  EXPECT_THAT(cpu.err, AllOf(HasSubstr("--picture-of prompt"), HasSubstr("GPU"), HasSubstr("--picture-of decode")));
}

TEST_F(PlanTest, SharedExpertsAreTheEnginesToChange) {
  const auto milliseconds = [&](const std::string& sharing) {
    const Ended ended = Plan({"--model", Model(2048), "--hardware", Path("cpu.toml"), "--context", "512", "--prompt", "100", "--batch", "16",
                              "--json", "--what-if", sharing});
    EXPECT_EQ(ended.code, kExitOk) << ended.err;
    EXPECT_THAT(ended.out, HasSubstr(sharing));
    return std::stod(ended.out.substr(ended.out.find("\"ms_per_token\": ") + 16));
  };
  EXPECT_GT(milliseconds("expert_sharing=off"), milliseconds("expert_sharing=on"));
  const Ended unknown = Plan({"--model", Model(2048), "--hardware", Path("cpu.toml"), "--what-if", "expert_sharing=maybe"});
  EXPECT_EQ(unknown.code, kExitConfig);
  EXPECT_THAT(unknown.err, HasSubstr("expert_sharing=on|off"));
}

TEST_F(PlanTest, TwoGpusSaySharedPromptsAndPromptsBesideStreams) {
  const Ended ended = Plan({"--model", Model(40000), "--hardware", "epyc-9355-2x5090", "--context", "512", "--prompt", "1024", "--batch", "1"});
  EXPECT_EQ(ended.code, kExitOk) << ended.err;
  EXPECT_THAT(ended.out, AllOf(HasSubstr("SmallEP sends 101% of dispatch's bytes at 2 experts a row, and less than all of them from 3 on"),
                               HasSubstr("a prompt on one GPU while streams decode on another, context 4096"),
                               ContainsRegex("16384 +2 .*\n +32768 +1 .*\n +32768 +2 ")));
}

// A shell's `ulimit -v` must not end in an abort: the image of a big model takes up addresses.
TEST_F(PlanTest, TooFewAddressesAreAnError) {
  const auto limited = [] {
    const rlimit limit{.rlim_cur = rlim_t{4} << 30, .rlim_max = rlim_t{4} << 30};
    setrlimit(RLIMIT_AS, &limit);
    std::exit(RunPlan({"--model", "deepseek-r1", "--hardware", "epyc-9355-2x5090"}));
  };
  EXPECT_EXIT(limited(), testing::ExitedWithCode(kExitFailure), "of addresses.*ulimit -v");
}

}  // namespace
}  // namespace hearth
