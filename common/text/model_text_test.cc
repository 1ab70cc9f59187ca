// A model's text from whichever files hold it, and errors by those files' own names.
#include "common/text/model_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "common/formats/gguf_test_util.h"

namespace hearth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class ModelTextTest : public ::testing::Test {
 protected:
  ModelTextTest() {
    std::string dir = testing::TempDir() + "/hearth_model_text_test_XXXXXX";
    dir_ = mkdtemp(dir.data());
  }
  ~ModelTextTest() override { std::filesystem::remove_all(dir_); }
  std::string Path() const { return dir_ + "/model.gguf"; }

  static absl::StatusOr<ModelText> Read(const std::string& path) {
    ASSIGN_OR_RETURN(const ModelFiles files, OpenModelFiles(path, GgufArrays::kValues));
    return ReadModelText(files);
  }
  absl::StatusOr<ModelText> OfGguf(const std::string& chat_template) {
    GgufTestWriter w;
    w.String("tokenizer.ggml.model", "gpt2");
    w.String("tokenizer.ggml.pre", "deepseek-v3");
    w.Strings("tokenizer.ggml.tokens", {"a", "b", "ab"});
    w.Strings("tokenizer.ggml.merges", {"a b"});
    if (!chat_template.empty()) w.String("tokenizer.chat_template", chat_template);
    w.Write(Path());
    return Read(Path());
  }

  std::string dir_;
};

TEST_F(ModelTextTest, OfAGgufFile) {
  const auto plain = OfGguf("");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(*plain->tokenizer->Encode("ab", {}), std::vector<int32_t>{2});
  EXPECT_EQ(plain->chat_template, nullptr);
  const auto with_template = OfGguf("{{ messages[0].content }}");
  ASSERT_TRUE(with_template.ok()) << with_template.status();
  EXPECT_NE(with_template->chat_template, nullptr);
  EXPECT_THAT(std::string(OfGguf("a\n{% elif %}").status().message()),
              AllOf(HasSubstr(Path()), HasSubstr("metadata key tokenizer.chat_template does not parse: line 2"), HasSubstr("tokenizer.json"),
                    Not(HasSubstr("tokenizer_config.json chat"))));
}

TEST_F(ModelTextTest, OfADirectory) {
  EXPECT_THAT(std::string(Read(dir_).status().message()), HasSubstr(dir_ + "/tokenizer.json"));
  const char* source = std::getenv("HEARTH_SOURCE_DIR");
  const std::string fable = std::string(source != nullptr ? source : ".") + "/deploy/models/fable-moe";
  const auto text = Read(fable);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_NE(text->chat_template, nullptr);
  std::filesystem::copy(fable + "/tokenizer.json", dir_ + "/tokenizer.json");
  EXPECT_EQ(Read(dir_)->chat_template, nullptr);
  std::ofstream(dir_ + "/chat_template.jinja") << "{% if %}";
  EXPECT_THAT(std::string(Read(dir_).status().message()), AllOf(HasSubstr(dir_), HasSubstr("chat template: line 1")));
}

}  // namespace
}  // namespace hearth
