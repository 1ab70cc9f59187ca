// What loading spends on looking at every byte, and how fast random checkpoints are written.
//   formats_bench --benchmark_filter=CheckValues        GB/s per type, over a buffer far above any cache
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/formats/synth.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

void BM_CheckValues(benchmark::State& state) {
  const DType dtype = static_cast<DType>(state.range(0));
  std::vector<uint8_t> data(256 << 20, 0x38);
  for (auto _ : state) {
    HEARTH_CHECK(CheckValues("w", dtype, data.data(), data.size() / DTypeBytes(dtype, 1), false).ok());
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * static_cast<int64_t>(data.size()));
  state.SetLabel(std::string(DTypeName(dtype)));
}
BENCHMARK(BM_CheckValues)->Arg(1)->Arg(2)->Arg(3)->Arg(4)->Unit(benchmark::kMillisecond);

// About 1 GB: 8 layers of 64 experts.
void BM_Synth(benchmark::State& state) {
  const std::string config =
      R"({"architectures":["DeepseekV3ForCausalLM"],"vocab_size":4096,"hidden_size":1024,"intermediate_size":4096,
    "moe_intermediate_size":640,"num_hidden_layers":9,"num_attention_heads":8,"max_position_embeddings":4096,"q_lora_rank":512,
    "kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,"rope_theta":10000,"n_routed_experts":64,
    "num_experts_per_tok":8,"n_shared_experts":1,"first_k_dense_replace":1,"n_group":8,"topk_group":4,"norm_topk_prob":true,
    "routed_scaling_factor":2.5,"eos_token_id":1,
    "quantization_config":{"quant_method":"fp8","fmt":"e4m3","weight_block_size":[128,128]}})";
  std::string dir = (std::filesystem::temp_directory_path() / "hearth_synth_XXXXXX").string();
  HEARTH_CHECK(::mkdtemp(dir.data()) != nullptr);
  uint64_t bytes = 0;
  for (auto _ : state) {
    SynthOptions options;
    options.out_dir = dir + "/m";
    options.progress = [&](uint64_t, uint64_t total) { bytes = total; };
    HEARTH_CHECK(WriteSynthCheckpoint(config, options).ok());
    state.PauseTiming();
    std::filesystem::remove_all(options.out_dir);
    state.ResumeTiming();
  }
  std::filesystem::remove_all(dir);
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * static_cast<int64_t>(bytes));
}
BENCHMARK(BM_Synth)->Unit(benchmark::kMillisecond)->Iterations(1);

}  // namespace
}  // namespace hearth

BENCHMARK_MAIN();
