// The MTP module's part of a pass (DeepSeek-V3 section 2.2): its KV beside the main model's, and drafts.
// The module is one decoder layer. What it caches of a position depends on that position's input alone, so writing its KV takes eh_proj and kv_a_proj and
// neither attention nor an expert: main passes do that for every position, whether drafts are wanted or not, and pages are whole for whoever goes on from them.
#include <algorithm>

#include "common/model/decoder_pass.h"

namespace hearth {

void DecoderPass::KeepHidden(const VectorF32& norm) {
  ForwardWorkspace& w = c_.workspace;
  const int64_t hidden = c_.config.hidden_size;
  c_.ops.RmsNorm(c_.stream, {.x = w.residual.as<float>(),
                             .ldx = hidden,
                             .weight = norm.data(),
                             .eps = static_cast<float>(c_.config.rms_norm_eps),
                             .m = m_,
                             .n = hidden,
                             .f32 = w.hidden.as<float>()});
}

void DecoderPass::WriteMtpKv(const MtpWeights& mtp, const AttentionWeights& attention) {
  ForwardWorkspace& w = c_.workspace;
  const int64_t hidden = c_.config.hidden_size;
  // A row's slot is made from the hidden state of the row before it, a sequence's first from the one that came with the batch, which lies behind
  // this pass's rows. A first row without one is not written: its input is of no account.
  int32_t* from = w.hidden_ids.as<int32_t>();
  std::vector<KvSequence> sequences = c_.batch.sequences;
  for (size_t i = 0; i < sequences.size(); ++i) {
    KvSequence& s = sequences[i];
    const float* prior = i < c_.batch.prior_hidden.size() ? c_.batch.prior_hidden[i] : nullptr;
    for (int64_t row = s.first_row; row < s.first_row + s.num_rows; ++row) from[row] = static_cast<int32_t>(row - 1);
    from[s.first_row] = static_cast<int32_t>(prior == nullptr ? s.first_row : w.rows + s.first_row);
    if (prior != nullptr) std::copy_n(prior, hidden, w.hidden.as<float>() + (w.rows + s.first_row) * hidden);
    s.write_from = std::max<int64_t>(s.write_from, 1);  // slot 0 is empty
  }
  c_.ops.GatherRows(c_.stream, {.x = w.hidden.as<float>(), .rows = from, .m = m_, .n = hidden, .out = w.previous.as<float>()});
  JoinMtpInput(mtp);
  Norm(w.residual.as<float>(), attention.input_norm, m_, hidden, w.normed);
  WriteKv(attention, c_.config.num_hidden_layers, sequences);
}

absl::Status DecoderPass::Draft(float* logits) {
  ForwardWorkspace& w = c_.workspace;
  const int64_t hidden = c_.config.hidden_size;
  std::copy(c_.batch.token_ids.begin(), c_.batch.token_ids.end(), w.token_ids.as<int32_t>());
  for (int64_t row = 0; row < m_; ++row) std::copy_n(c_.batch.prior_hidden[static_cast<size_t>(row)], hidden, w.previous.as<float>() + row * hidden);
  JoinMtpInput(*c_.weights.mtp);
  TraceLaps laps(c_.stream.trace_track());
  Layer(c_.config.num_hidden_layers);
  laps.Lap("layer", "layer rows", c_.config.num_hidden_layers, m_);
  KeepHidden(c_.weights.mtp->head_norm);
  Logits(c_.weights.mtp->head_norm, c_.weights.mtp->head, logits);
  return c_.stream.Synchronize();
}

// eh_proj of [enorm(embedding of the row's token) | hnorm(w.previous)], into the residual stream.
void DecoderPass::JoinMtpInput(const MtpWeights& mtp) {
  ForwardWorkspace& w = c_.workspace;
  const int64_t hidden = c_.config.hidden_size;
  c_.ops.Embed(c_.stream, {.table = mtp.embedding, .token_ids = w.token_ids.as<int32_t>(), .m = m_, .out = w.residual.as<float>()});
  const auto norm_half = [&](const Buffer& x, const VectorF32& weight, int64_t half) {
    c_.ops.RmsNorm(c_.stream, {.x = x.as<float>(),
                               .ldx = hidden,
                               .weight = weight.data(),
                               .eps = static_cast<float>(c_.config.rms_norm_eps),
                               .m = m_,
                               .n = hidden,
                               .terms = w.terms,
                               .out = w.joined.as<bf16>() + half * hidden,
                               .ldo = 2 * hidden});
  };
  norm_half(w.residual, mtp.enorm, 0);
  norm_half(w.previous, mtp.hnorm, 1);
  Linear(mtp.eh_proj, w.joined, m_, w.residual);
}

}  // namespace hearth
