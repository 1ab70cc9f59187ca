// Values that would poison an answer are found wherever they hide.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/formats/formats_test_util.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CheckValues, AcceptsEveryFp8CodeButNan) {
  std::vector<uint8_t> codes;
  for (int c = 0; c < 256; ++c) {
    if (!std::isnan(F8E4M3ToFloat(static_cast<uint8_t>(c)))) codes.push_back(static_cast<uint8_t>(c));
  }
  EXPECT_EQ(codes.size(), 254u);
  EXPECT_TRUE(CheckValues("w", DType::kF8E4M3, codes.data(), codes.size(), false).ok());
}

TEST(CheckValues, FindsOneNanAnywhere) {
  for (const uint8_t code : {uint8_t{0x7f}, uint8_t{0xff}}) {
    for (const size_t at : {0u, 1u, 15u, 4095u, 4096u, 9000u, 9999u}) {
      std::vector<uint8_t> codes(10'000, 0x38);
      codes[at] = code;
      const absl::Status status = CheckValues("experts.7.up", DType::kF8E4M3, codes.data(), codes.size(), false);
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(Message(status), AllOf(HasSubstr("experts.7.up"), HasSubstr("element " + std::to_string(at) + " of 10000"), HasSubstr("bits 0x")));
    }
  }
}

// All 65,536 patterns of both 16-bit types, against the conversion that computing uses.
TEST(CheckValues, SixteenBitTypesAgreeWithTheirConversions) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t b = static_cast<uint16_t>(bits);
    const float as_bf16 = ToFloat(bf16{b});
    EXPECT_EQ(CheckValues("n", DType::kBF16, &b, 1, false).ok(), std::isfinite(as_bf16)) << bits;
    EXPECT_EQ(CheckValues("n", DType::kF16, &b, 1, false).ok(), std::isfinite(F16ToFloat(b))) << bits;
    EXPECT_EQ(CheckValues("s", DType::kBF16, &b, 1, true).ok(), as_bf16 > 0 && std::isfinite(as_bf16 * 448.0f)) << bits;
  }
}

TEST(CheckValues, ScalesMustBePositiveAndFinite) {
  const auto ok = [](float value) { return CheckValues("s", DType::kF32, &value, 1, true).ok(); };
  EXPECT_TRUE(ok(1.0f));
  EXPECT_TRUE(ok(std::numeric_limits<float>::denorm_min()));
  const float most = std::numeric_limits<float>::max() / 448;  // E4M3's largest code
  EXPECT_TRUE(ok(most));
  for (float bad : {std::nextafter(most, INFINITY), std::numeric_limits<float>::max(), 0.0f, -0.0f, -1.0f, INFINITY, -INFINITY, NAN,
                    -std::numeric_limits<float>::denorm_min()})
    EXPECT_FALSE(ok(bad)) << bad;
  const float minus = -1.0f;
  EXPECT_TRUE(CheckValues("w", DType::kF32, &minus, 1, false).ok());  // a weight may be negative
  for (float bad : {INFINITY, -INFINITY, NAN}) EXPECT_FALSE(CheckValues("w", DType::kF32, &bad, 1, false).ok());
}

TEST(CheckValues, TakesUnalignedData) {
  std::vector<unsigned char> raw(4 * 5000 + 1);
  std::vector<float> values(5000, 0.5f);
  values[4321] = NAN;
  std::memcpy(raw.data() + 1, values.data(), 4 * values.size());
  EXPECT_THAT(Message(CheckValues("w", DType::kF32, raw.data() + 1, values.size(), false)), HasSubstr("element 4321 of 5000"));
}

TEST(CheckValues, EmptyIsFineAndUnknownTypesAreNot) {
  EXPECT_TRUE(CheckValues("w", DType::kF32, nullptr, 0, false).ok());
  const uint8_t byte = 1;
  EXPECT_EQ(CheckValues("w", DType::kInvalid, &byte, 1, false).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckValues("w", DType::kF8E4M3, &byte, 1, true).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace hearth
