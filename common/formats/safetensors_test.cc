// One file's header and whole directories, good and damaged.
#include "common/formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>

#include "common/formats/formats_test_util.h"

namespace hearth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SafetensorsTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::vector<CheckpointTensor>> Read(std::string_view bytes) {
    WriteFile(dir_.At("x.safetensors"), bytes);
    return ReadSafetensorsHeader(dir_.At("x.safetensors"));
  }
  void ExpectRefused(std::string_view bytes, absl::StatusCode code, std::string_view part) {
    const auto result = Read(bytes);
    EXPECT_EQ(result.status().code(), code) << result.status();
    EXPECT_THAT(Message(result.status()), AllOf(HasSubstr("x.safetensors"), HasSubstr(std::string(part))));
  }
  void ExpectHeaderRefused(std::string_view header, std::string_view part, uint64_t data_bytes = 4) {
    ExpectRefused(SafetensorsBytes(header, data_bytes), absl::StatusCode::kInvalidArgument, part);
  }
  TempDir dir_;
};

TEST_F(SafetensorsTest, ReadsTensorsInOrderOfOffset) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F8_E4M3","shape":[2,3],"data_offsets":[8,14]},)"
      R"("a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"empty":{"dtype":"F32","shape":[0,4611686018427387904,8],"data_offsets":[8,8]},)"
      R"("steps":{"dtype":"I64","shape":[],"data_offsets":[14,22]},"new":{"dtype":"F2_X","shape":[9],"data_offsets":[22,25]}}   )";
  const auto tensors = Read(SafetensorsBytes(header, 25));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 5u);
  const CheckpointTensor& a = (*tensors)[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.dtype, DType::kBF16);
  EXPECT_EQ(a.offset, 8 + header.size());
  EXPECT_EQ(a.bytes, 8u);
  EXPECT_EQ((*tensors)[1].name, "empty");
  EXPECT_EQ((*tensors)[2].shape, (std::vector<int64_t>{2, 3}));
  // Types that we can't compute with are kept, by name: only a plan that needs them refuses them.
  EXPECT_EQ((*tensors)[3].dtype, DType::kInvalid);
  EXPECT_EQ((*tensors)[3].dtype_name, "I64");
  EXPECT_EQ((*tensors)[4].dtype_name, "F2_X");
}

TEST_F(SafetensorsTest, AnEmptyFileOfTensorsIsFine) {
  const auto tensors = Read(SafetensorsBytes("{}", 0));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_TRUE(tensors->empty());
}

TEST_F(SafetensorsTest, RefusesFilesTooShortForALength) {
  for (size_t n = 0; n < 8; ++n) ExpectRefused(std::string(n, '\0'), absl::StatusCode::kDataLoss, "incomplete download?");
  ExpectRefused(std::string(8, '\0'), absl::StatusCode::kInvalidArgument, "header length 0");
  ExpectRefused(std::string(9, '\0'), absl::StatusCode::kInvalidArgument, "header length 0");
}

TEST_F(SafetensorsTest, RefusesImpossibleHeaderLengths) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  const uint64_t file_bytes = 8 + header.size() + 4;
  ASSERT_TRUE(Read(SafetensorsBytes(header, 4)).ok());
  for (uint64_t n : {uint64_t{0}, uint64_t{1}}) {
    ExpectRefused(SafetensorsBytes(header, 4, n), absl::StatusCode::kInvalidArgument, "header length");
  }
  ExpectRefused(SafetensorsBytes(header, 4, 7), absl::StatusCode::kInvalidArgument, "not valid JSON");
  ExpectRefused(SafetensorsBytes(header, 4, file_bytes), absl::StatusCode::kDataLoss, "truncated");
  ExpectRefused(SafetensorsBytes(header, 4, file_bytes - 7), absl::StatusCode::kDataLoss, "truncated");
  ExpectRefused(SafetensorsBytes(header, 4, file_bytes - 8), absl::StatusCode::kInvalidArgument, "not valid JSON");
  // At the cap the length is believed and the file is found too short; one above is refused for itself. Neither
  // allocates.
  ExpectRefused(SafetensorsBytes(header, 4, kSafetensorsHeaderMax), absl::StatusCode::kDataLoss, "truncated");
  ExpectRefused(SafetensorsBytes(header, 4, kSafetensorsHeaderMax + 1), absl::StatusCode::kInvalidArgument, "100000000");
  ExpectRefused(SafetensorsBytes(header, 4, uint64_t{1} << 63), absl::StatusCode::kInvalidArgument, "100000000");
  ExpectRefused(SafetensorsBytes(header, 4, ~uint64_t{0}), absl::StatusCode::kInvalidArgument, "100000000");
}

TEST_F(SafetensorsTest, RefusesA132MegabyteHeaderWithoutReadingIt) {
  const std::string path = dir_.At("big.safetensors");
  WriteFile(path, SafetensorsBytes("{", 0, 132'000'000));
  std::filesystem::resize_file(path, 8 + 132'000'000 + 64);  // sparse
  rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  const auto result = ReadSafetensorsHeader(path);
  getrusage(RUSAGE_SELF, &after);
  EXPECT_THAT(Message(result.status()), AllOf(HasSubstr("132000000"), HasSubstr("100000000")));
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 20'000);  // kB
}

TEST_F(SafetensorsTest, HeadersOfAnyLengthAroundABoundaryWork) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  for (size_t length = 99'993; length <= 100'001; ++length) {
    std::string padded = header;
    padded.append(length - header.size(), ' ');
    const auto tensors = Read(SafetensorsBytes(padded, 4));
    ASSERT_TRUE(tensors.ok()) << length << ": " << tensors.status();
    EXPECT_EQ((*tensors)[0].offset, 8 + length);
  }
}

TEST_F(SafetensorsTest, RefusesHeadersThatAreNotTheFormat) {
  ExpectHeaderRefused(R"( {"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "does not start with '{'");
  ExpectHeaderRefused(R"([1,2,3])", "does not start with '{'");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})", "not valid JSON");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}x)", "not valid JSON");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}})", "NaN");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "negative");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "whole number");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}})", "whole number");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4]}})", "2^63");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", "array");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}})", "more than 8");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", "number");
  ExpectHeaderRefused(R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", "number");
  ExpectHeaderRefused(R"({"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}})", "array");
  ExpectHeaderRefused(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "required");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "required");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[1]}})", "required");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", "[begin, end]");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "backwards");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "twice");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"stride":[1]}})", "stride");
  ExpectHeaderRefused(R"({"a":[1]})", "array");
  ExpectHeaderRefused(R"({"a":null})", "null");
  ExpectHeaderRefused(R"({"__metadata__":{"x":{"y":1}}})", "object");
  ExpectHeaderRefused(R"({"__metadata__":{},"__metadata__":{}})", "twice");
}

TEST_F(SafetensorsTest, RefusesShapesThatDontFitTheirBytes) {
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", "needs 8 bytes");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}})", "2^64");
  ExpectHeaderRefused(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}})", "2^64");
  ExpectHeaderRefused(R"({"a":{"dtype":"I64","shape":[2],"data_offsets":[0,4]}})", "needs 16 bytes");
  ExpectHeaderRefused(R"({"a":{"dtype":"F4","shape":[7],"data_offsets":[0,4]}})", "needs 4 bytes");  // 3.5 bytes
}

TEST_F(SafetensorsTest, RefusesGapsOverlapsAndDuplicates) {
  const auto two = [](int begin, int end) {
    return absl::StrCat(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[)", begin, ",", end,
                        "]}}");
  };
  ASSERT_TRUE(Read(SafetensorsBytes(two(4, 8), 8)).ok());
  ExpectHeaderRefused(two(5, 9), "gap", 9);
  ExpectHeaderRefused(two(3, 7), "overlap", 7);
  ExpectHeaderRefused(two(0, 4), "overlap", 4);
  ExpectHeaderRefused(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", "gap", 5);
  ExpectHeaderRefused(two(4, 8), "left over", 9);
  ExpectRefused(SafetensorsBytes(two(4, 8), 7), absl::StatusCode::kDataLoss, "truncated");
  ExpectHeaderRefused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", "twice");
}

TEST_F(SafetensorsTest, RefusesWhatIsNotARegularFile) {
  ASSERT_EQ(::mkfifo(dir_.At("pipe.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(Message(ReadSafetensorsHeader(dir_.At("pipe.safetensors")).status()), HasSubstr("not a regular file"));
  EXPECT_THAT(Message(ReadSafetensorsHeader(dir_.path()).status()), HasSubstr("not a regular file"));
  const absl::Status absent = ReadSafetensorsHeader(dir_.At("no/such/file")).status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(absent), HasSubstr("stopped at " + dir_.At("no")));
}

// Whatever is cut off or flipped in header or length, opening answers; it never crashes, hangs or allocates by a lie.
TEST_F(SafetensorsTest, SurvivesEveryTruncationAndBitFlip) {
  const std::string good = SafetensorsOf({{"model.a", "F8_E4M3", {2, 4}, 8}, {"model.a_scale_inv", "F32", {1, 1}, 4}, {"b", "I64", {}, 8}});
  ASSERT_TRUE(Read(good).ok());
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_FALSE(Read(std::string_view(good).substr(0, length)).ok()) << length;
  }
  int accepted = 0;
  for (size_t byte = 0; byte < good.size() - 20; ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = good;
      flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << bit));
      accepted += Read(flipped).ok();
    }
  }
  EXPECT_GT(accepted, 0);  // a letter of a name is anybody's
}

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i = 1; i <= 3; ++i) {
      WriteFile(Shard(i), SafetensorsOf({{absl::StrCat("t", i), "BF16", {2}, 4}, {absl::StrCat("u", i), "F32", {3}, 12}}));
    }
    WriteIndex(R"({"metadata":{"total_size":1.5e1},"weight_map":{"t1":"s1.safetensors","u1":"s1.safetensors","t2":"s2.safetensors",)"
               R"("u2":"s2.safetensors","t3":"s3.safetensors","u3":"s3.safetensors"}})");
  }
  std::string Shard(int i) { return dir_.At(absl::StrCat("s", i, ".safetensors")); }
  void WriteIndex(std::string_view text) { WriteFile(dir_.At("model.safetensors.index.json"), text); }
  void ExpectRefused(absl::StatusCode code, std::vector<std::string> parts) {
    const auto opened = Checkpoint::Open(dir_.path());
    EXPECT_EQ(opened.status().code(), code) << opened.status();
    for (const std::string& part : parts) EXPECT_THAT(Message(opened.status()), HasSubstr(part));
  }
  TempDir dir_;
};

TEST_F(CheckpointTest, OpensShards) {
  const auto checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->files().size(), 3u);
  EXPECT_EQ(checkpoint->tensors().size(), 6u);
  ASSERT_NE(checkpoint->Find("u2"), nullptr);
  EXPECT_EQ(checkpoint->files()[static_cast<size_t>(checkpoint->Find("u2")->file)].path, Shard(2));
  EXPECT_EQ(checkpoint->Find("nothing"), nullptr);
  uint64_t bytes = 0;
  for (int i = 1; i <= 3; ++i) bytes += std::filesystem::file_size(Shard(i));
  EXPECT_EQ(checkpoint->total_bytes(), bytes);
}

TEST_F(CheckpointTest, NamesEveryMissingShard) {
  std::filesystem::remove(Shard(1));
  std::filesystem::remove(Shard(3));
  ExpectRefused(absl::StatusCode::kNotFound, {"2 of 3 files", "s1.safetensors", "s3.safetensors", "incomplete download?"});
}

TEST_F(CheckpointTest, SeesAShardThatLacksItsLastByte) {
  std::filesystem::resize_file(Shard(2), std::filesystem::file_size(Shard(2)) - 1);
  ExpectRefused(absl::StatusCode::kDataLoss, {"s2.safetensors", "incomplete download?"});
}

TEST_F(CheckpointTest, SeesAShardOfAnotherRevision) {
  WriteFile(Shard(2), SafetensorsOf({{"t2", "BF16", {2}, 4}, {"v2", "F32", {3}, 12}}));
  ExpectRefused(absl::StatusCode::kNotFound, {"u2 (s2.safetensors)", "two revisions?"});
  WriteFile(Shard(2), SafetensorsOf({{"t2", "BF16", {2}, 4}, {"u2", "F32", {3}, 12}, {"v2", "F32", {3}, 12}}));
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"v2 (s2.safetensors)"});
}

TEST_F(CheckpointTest, SeesATensorInTwoFiles) {
  WriteFile(Shard(2), SafetensorsOf({{"t2", "BF16", {2}, 4}, {"u2", "F32", {3}, 12}, {"t1", "BF16", {2}, 4}}));
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"\"t1\"", "s1.safetensors", "s2.safetensors"});
}

TEST_F(CheckpointTest, SeesATensorInAnotherFileThanTheIndexSays) {
  WriteFile(Shard(1), SafetensorsOf({{"t2", "BF16", {2}, 4}, {"u1", "F32", {3}, 12}}));
  WriteFile(Shard(2), SafetensorsOf({{"t1", "BF16", {2}, 4}, {"u2", "F32", {3}, 12}}));
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"t1 (index: s1.safetensors, found in s2.safetensors)"});
}

TEST_F(CheckpointTest, RefusesIndexesThatAreNoIndexes) {
  for (const char* text :
       {"", "[]", "7", "{}", R"({"weight_map":null})", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"a":7}})",
        R"({"weight_map":{"a":{}}})", R"({"weight_map":{"a":"../x"}})", R"({"weight_map":{"a":"/etc/passwd"}})", R"({"weight_map":{"a":""}})",
        R"({"weight_map":{"a":"."}})", R"({"weight_map":{"a":"x\u0000y"}})", R"({"weight_map":{"a":"s1.safetensors","a":"s2.safetensors"}})",
        R"({"weight_map":{},"weight_map":{}})", R"({"weight_map":{"a":"s1.safetensors"})"}) {
    WriteIndex(text);
    const auto opened = Checkpoint::Open(dir_.path());
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kInvalidArgument) << text << opened.status();
    EXPECT_THAT(Message(opened.status()), HasSubstr("index.json")) << text;
  }
  WriteIndex(R"({"metadata":)" + std::string(5000, '[') + std::string(5000, ']') + "}");
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"nested deeper"});
}

TEST_F(CheckpointTest, WithoutAnIndexTakesWhatIsThere) {
  std::filesystem::remove(dir_.At("model.safetensors.index.json"));
  auto checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->tensors().size(), 6u);
  WriteFile(dir_.At("model.safetensors"), SafetensorsOf({{"only", "F32", {1}, 4}}));
  checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->tensors().size(), 1u);
}

TEST_F(CheckpointTest, RefusesTwoCheckpointsInOneDirectory) {
  WriteFile(dir_.At("model.safetensors"), SafetensorsOf({{"only", "F32", {1}, 4}}));
  ExpectRefused(absl::StatusCode::kInvalidArgument, {"two checkpoints"});
}

TEST_F(CheckpointTest, RefusesEmptyAndAbsentDirectories) {
  TempDir empty;
  EXPECT_EQ(Checkpoint::Open(empty.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Checkpoint::Open(empty.At("none")).status().code(), absl::StatusCode::kNotFound);
}

TEST(PackedInt4, PermutedGroupsZeroPointsAndOtherWordsAreRefused) {
  TempDir dir;
  const auto error = [&](const FakeTensor& tensor) {
    WriteFile(dir.At("model.safetensors"), SafetensorsOf({tensor}));
    return Message(Checkpoint::Open(dir.path()).status());
  };
  EXPECT_THAT(error({"a.weight_g_idx", "I32", {32}, 128}), AllOf(HasSubstr("a.weight_g_idx"), HasSubstr("permuted")));
  EXPECT_THAT(error({"a.weight_zero_point", "I32", {1, 1}, 4}), HasSubstr("a.weight_zero_point"));
  EXPECT_THAT(error({"a.weight_packed", "U8", {2, 16}, 32}), AllOf(HasSubstr("a.weight_packed"), HasSubstr("U8"), HasSubstr("I32")));
}

}  // namespace
}  // namespace hearth
