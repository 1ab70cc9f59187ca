// Tests of common/base: conversions bit for bit, config refusals, process identity.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>

#include "common/base/dtype.h"
#include "common/base/hash.h"
#include "common/base/logging.h"
#include "common/base/node_config.h"
#include "common/base/process.h"
#include "common/base/time.h"

namespace hearth {
namespace {

using ::testing::HasSubstr;

TEST(DType, Fp8CodesRoundTrip) {
  for (int code = 0; code < 256; ++code) {
    const float value = F8E4M3ToFloat(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(FloatToF8E4M3(value), code) << value;
    }
  }
  EXPECT_EQ(F8E4M3ToFloat(0x38), 1.0f);
  EXPECT_EQ(F8E4M3ToFloat(0x7e), 448.0f);
  EXPECT_EQ(F8E4M3ToFloat(0x01), std::ldexp(1.0f, -9));
}

TEST(DType, Fp8RoundsToNearestEven) {
  // For each pair of neighbours: just below the middle goes down, just above goes up, the middle to the even code.
  for (int code = 0; code < 0x7e; ++code) {
    const float low = F8E4M3ToFloat(static_cast<uint8_t>(code));
    const float high = F8E4M3ToFloat(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    EXPECT_EQ(FloatToF8E4M3(std::nextafter(middle, low)), code);
    EXPECT_EQ(FloatToF8E4M3(std::nextafter(middle, high)), code + 1);
    EXPECT_EQ(FloatToF8E4M3(middle), code % 2 == 0 ? code : code + 1);
  }
  EXPECT_EQ(FloatToF8E4M3(1e9f), 0x7e);
}

TEST(DType, F16AndBf16RoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float h = F16ToFloat(static_cast<uint16_t>(bits));
    if (!std::isnan(h)) {
      EXPECT_EQ(FloatToF16(h), bits);
    }
    const float b = ToFloat(bf16{static_cast<uint16_t>(bits)});
    if (!std::isnan(b)) {
      EXPECT_EQ(ToBf16(b).bits, bits);
    }
  }
  EXPECT_EQ(ToBf16(1.00390625f).bits, 0x3f80);  // halfway between 1 and the next: even
  EXPECT_TRUE(std::isnan(ToFloat(ToBf16(std::nanf("")))));
}

TEST(Hash, HexRoundTripAndPieces) {
  const Hash128 h = RandomHash128();
  EXPECT_EQ(Hash128FromHex(h.ToHex()), h);
  EXPECT_FALSE(Hash128FromHex("xyz").has_value());
  Hasher128 pieces;
  pieces.Update("abc");
  pieces.Update("def");
  EXPECT_EQ(pieces.Digest(), Xxh3_128("abcdef", 6));
}

TEST(Process, IdentityEndsWithTheProcess) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const ProcessId id = *ProcessOf(child);
  EXPECT_TRUE(IsAlive(id));
  EXPECT_FALSE(IsAlive({id.pid, id.start_ticks + 1})) << "a reused pid has another start time";
  kill(child, SIGKILL);
  // A zombie has exited as far as memory is concerned.
  for (int i = 0; i < 1000 && IsAlive(id); ++i) usleep(1000);
  EXPECT_FALSE(IsAlive(id));
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(IsAlive(id));
}

TEST(Logging, StormIsCounted) {
  int shown = 0, last_suppressed = -1;
  for (int i = 0; i < 100; ++i) {
    if (auto permit = LogAllowed("storm-test", 3)) {
      ++shown;
      last_suppressed = permit->suppressed;
    }
  }
  EXPECT_EQ(shown, 3);
  EXPECT_EQ(last_suppressed, 0);
}

TEST(NodeConfig, DefaultsAndOverrides) {
  const auto config =
      ParseNodeConfig("[model]\npath = \"/models/fable-moe/\"\n[decode]\nmax_batch = 3\n[router]\nhttp_listen = \"[::1]:9\"", "node.toml");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->model_name, "fable-moe");
  EXPECT_EQ(config->max_batch, 3);
  EXPECT_EQ(config->http_listen, std::vector<std::string>{"[::1]:9"});
  const auto again = ParseNodeConfig(FormatNodeConfig(*config), "printed");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(FormatNodeConfig(*again), FormatNodeConfig(*config));
}

TEST(NodeConfig, AModelIsNamedAfterItsPath) {
  EXPECT_EQ(DefaultModelName("/models/DeepSeek-R1/"), "DeepSeek-R1");
  EXPECT_EQ(DefaultModelName("/models/Kimi-K2.gguf"), "Kimi-K2");
  EXPECT_EQ(DefaultModelName("r1/DeepSeek-R1-Q4_K_M-00001-of-00009.gguf"), "DeepSeek-R1-Q4_K_M");
  EXPECT_EQ(DefaultModelName("-00001-of-00009.gguf"), "-00001-of-00009");
  EXPECT_EQ(DefaultModelName("/models/v2-00001-of-0000x.gguf"), "v2-00001-of-0000x");
}

TEST(NodeConfig, RingsAreForStreamedWeights) {
  const auto with = [](const std::string& path) {
    return ParseNodeConfig("[model]\npath = \"/m\"\n[prefill]\nexpert_source = \"ring\"\nring_slots = 4\npath = \"" + path + "\"", "node.toml");
  };
  ASSERT_TRUE(with("slp").ok()) << with("slp").status();
  EXPECT_EQ(with("slp")->ring_slots, 4);
  for (const char* path : {"auto", "chunked"}) {
    EXPECT_THAT(std::string(with(path).status().message()), HasSubstr("prefill.expert_source = \"ring\" is for prefill.path = \"slp\"")) << path;
  }
}

TEST(NodeConfig, FastNumericsAllowTiles) {
  const auto config = ParseNodeConfig("[node]\nnumerics = \"fast\"\n[model]\npath = \"/m\"\n[decode]\nisa = \"amx\"", "node.toml");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(FormatNodeConfig(*config), HasSubstr("numerics = \"fast\""));
  EXPECT_EQ(NodeConfig().numerics, "exact");
  EXPECT_TRUE(NodeConfig().AllowsIsa("avx512bf16").ok());
  EXPECT_FALSE(NodeConfig().AllowsIsa("amx").ok()) << "from a worker's --isa";
}

TEST(NodeConfig, RefusalsNameKeyAndLine) {
  const auto error = [](std::string_view text) { return std::string(ParseNodeConfig(text, "node.toml").status().message()); };
  EXPECT_THAT(error("[model]\npath = \"/m\"\n[decode]\nbatch = 3"), HasSubstr("node.toml:4: unknown key 'decode.batch'"));
  EXPECT_THAT(error("[modle]\npath = \"/m\""), HasSubstr("unknown key 'modle'"));
  EXPECT_THAT(error("[model]\npath = 3"), HasSubstr("model.path must be a string"));
  EXPECT_THAT(error("[model]\npath = \"/m\"\n[decode]\nmax_batch = 0"), HasSubstr("decode.max_batch = 0 is outside 1 to 256"));
  EXPECT_THAT(error("[decode]\nmax_batch = 1"), HasSubstr("model.path is missing"));
  EXPECT_THAT(error("[model\n"), HasSubstr("node.toml:1"));
  EXPECT_THAT(error("[model]\npath = \"/m\"\n[decode]\nisa = \"mmx\""), HasSubstr("decode.isa 'mmx' is unknown"));
  EXPECT_THAT(error("[model]\npath = \"/m\"\n[node]\nnumerics = \"quick\""), HasSubstr("node.numerics 'quick' is unknown: use exact, fast"));
  EXPECT_THAT(error("[model]\npath = \"/m\"\n[decode]\nisa = \"amx\""),
              HasSubstr("decode.isa: the path 'amx' is not exact: set node.numerics = \"fast\""));
  EXPECT_THAT(error("[model]\npath = \"/m\"\n[decode]\noverlap = \"both\""), HasSubstr("decode.overlap 'both' is unknown"));
  for (const char* value : {"4", "-1", "\"on\"", "true"}) {
    EXPECT_THAT(error(std::string("[model]\npath = \"/m\"\n[decode]\nspeculation = ") + value),
                HasSubstr("decode.speculation must be \"auto\" or a whole number from 0 to 3"));
  }
}

TEST(Time, ForPeople) {
  EXPECT_EQ(HumanBytes(29.8e6), "29.8 MB");
  EXPECT_EQ(HumanBytes(512), "512 B");
  EXPECT_EQ(HumanDuration(0.85), "850 ms");
  EXPECT_EQ(HumanDuration(245), "4 min 05 s");
}

}  // namespace
}  // namespace hearth
