// Writes a checkpoint once more for the node tests: as a bare GGUF file, and as a directory of the numbers that its blocks stand for, in F32.
// Usage: write_gguf_model MODEL_DIR TO; prints both paths, a line each.
#include <cstdio>
#include <filesystem>

#include "tests/quantized_models.h"

int main(int argc, char** argv) {
  using namespace hearth;
  if (argc != 3) {
    std::fprintf(stderr, "usage: write_gguf_model MODEL_DIR TO\n");
    return 1;
  }
  const std::string from = argv[1];
  const absl::StatusOr<QuantizedModels> models = WriteGgufModels(
      from, argv[2], [](const PlannedTensor& p) { return Fitting(p, DType::kQ8_0); }, /*split_kv_b=*/true);
  if (!models.ok()) {
    std::fprintf(stderr, "write_gguf_model: %s\n", std::string(models.status().message()).c_str());
    return 1;
  }
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    std::filesystem::copy(from + "/" + name, models->plain + "/" + name);
  }
  std::printf("%s\n%s\n", models->quantized.c_str(), models->plain.c_str());
  return 0;
}
