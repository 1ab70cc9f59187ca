#include "common/slp/slp_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/ceil_div.h"
#include "common/base/time.h"

namespace hearth {
namespace {

constexpr int64_t kSlotsMin = 2;
// Two would do; four hold a layer's two and the next layer's. With fewer the link stands still while a dense layer's network, or a layer's shared expert, is
// computed: their slots are free at the layer's end, and nothing behind the sub-layer that waits for one is loaded before it.
constexpr int64_t kSubLayerSlots = 4;
// With dispatch a rank has room for an even share of the rows and so many more, as stripes of many sequences have it.
constexpr int64_t kUnevenRows = 64;
constexpr uint64_t kRoundingRoom = 32 * 64;  // a device may round each buffer up to a cache line

// Rows [first, first + count) of a buffer of rows, not owned.
Buffer Alias(const Buffer& whole, int64_t first, int64_t count, int64_t row_bytes) {
  return Buffer(whole.as<uint8_t>() + first * row_bytes, static_cast<size_t>(count * row_bytes), nullptr);
}

}  // namespace

absl::StatusOr<SlpSizes> ChooseSlpSizes(const SlpRoom& room) {
  const int64_t slots_min = room.slot_bytes > 0 ? kSlotsMin : 0;
  const uint64_t with_slots = room.fixed + static_cast<uint64_t>(slots_min) * room.slot_bytes;
  const uint64_t needed = with_slots + static_cast<uint64_t>(room.rows_min) * room.row_bytes;
  if (needed > room.left) {
    return absl::ResourceExhaustedError(
        absl::StrCat("streaming weights needs ", HumanBytes(static_cast<double>(needed)), " of device memory at least (", room.rows_min,
                     " rows, and ", slots_min, " experts of ", HumanBytes(static_cast<double>(room.slot_bytes)), "); the budget has ",
                     HumanBytes(static_cast<double>(room.left)), " left: raise prefill.device_memory_bytes or lower prefill.chunk_tokens"));
  }
  SlpSizes sizes;
  sizes.rows = static_cast<int64_t>(std::min<uint64_t>((room.left - with_slots) / room.row_bytes, static_cast<uint64_t>(room.rows_max)));
  if (room.slot_bytes == 0) return sizes;
  const uint64_t for_slots = room.left - room.fixed - static_cast<uint64_t>(sizes.rows) * room.row_bytes;
  sizes.expert_slots = static_cast<int64_t>(std::min<uint64_t>(for_slots / room.slot_bytes, static_cast<uint64_t>(room.slots_max)));
  return sizes;
}

absl::StatusOr<std::unique_ptr<SlpMemory>> SlpMemory::Make(Device& device, const Model& model, const WeightPlan& plan, const SlpOptions& options) {
  const ModelConfig& c = model.config();
  auto memory = std::make_unique<SlpMemory>();
  SlpMemory& m = *memory;
  const int64_t ranks = options.ranks;
  const bool dispatch = ranks > 1 && options.exchange == ExpertExchange::kDispatch;
  const int64_t chunk_rows = std::min(options.chunk_rows, options.max_rows);
  ASSIGN_OR_RETURN(m.chunk, ForwardWorkspace::Make(c, model.has_mtp(), device, chunk_rows, options.with_logits ? chunk_rows : 0));
  // These become aliases.
  for (Buffer* buffer : {&m.chunk->token_ids, &m.chunk->residual, &m.chunk->normed, &m.chunk->expert_ids, &m.chunk->expert_weights, &m.chunk->moe}) {
    *buffer = Buffer();
  }
  m.hidden_ = c.hidden_size;
  m.terms_ = device.caps().activation_terms;
  m.top_k_ = plan.expert_bytes_max() > 0 ? c.num_experts_per_tok : 0;
  const bool has_experts = m.top_k_ > 0;
  const uint64_t expert_room =
      has_experts ? ExpertRowsWorkspaceBytes(chunk_rows, c.hidden_size, c.moe_intermediate_size, model.num_shards(), static_cast<int>(m.terms_)) : 0;

  struct Width {
    Buffer* buffer;
    int64_t row_bytes;
  };
  const int64_t input_bytes = 2 * m.terms_ * m.hidden_;
  const int64_t f32_bytes = 4 * m.hidden_;
  std::vector<Width> of_all = {{&m.token_ids, 4}, {&m.residual, f32_bytes}, {&m.normed, input_bytes}};
  std::vector<Width> of_own;  // rows of one rank
  if (has_experts) {
    for (Buffer* buffer : {&m.expert_ids, &m.expert_weights, &m.rows_by_expert, &m.weights_by_expert}) of_all.push_back({buffer, 4 * m.top_k_});
    for (Buffer& sum : m.sums) of_all.push_back({&sum, f32_bytes});
    if (dispatch) {
      of_all.insert(of_all.end(), {{&m.received, input_bytes * m.top_k_}, {&m.outputs, f32_bytes * m.top_k_}});
      of_own = {{&m.own_rows_by_expert, 4 * m.top_k_},
                {&m.own_weights_by_expert, 4 * m.top_k_},
                {&m.sent, input_bytes * m.top_k_},
                {&m.returned, f32_bytes * m.top_k_}};
    }
  }
  const auto row_bytes = [](const std::vector<Width>& widths) {
    int64_t bytes = 0;
    for (const Width& width : widths) bytes += width.row_bytes;
    return bytes;
  };
  const uint64_t count_bytes = dispatch && has_experts ? static_cast<uint64_t>(4 * ranks * c.n_routed_experts) : 0;
  const uint64_t end_bytes = ranks > 1 && model.has_mtp() ? static_cast<uint64_t>(2 * ranks * f32_bytes) : 0;
  SlpRoom room{.fixed = kSubLayerSlots * (plan.sub_layer_bytes_max() + DeviceRing::kSlotAlign) + expert_room + count_bytes + end_bytes +
                        static_cast<uint64_t>((kUnevenRows + 1) * row_bytes(of_own)) + kRoundingRoom,
               .row_bytes = static_cast<uint64_t>(row_bytes(of_all) + CeilDiv(row_bytes(of_own), ranks)),
               .slot_bytes = plan.expert_bytes_max(),
               .rows_min = chunk_rows,
               .rows_max = options.max_rows,
               .slots_max = options.expert_slots > 0 ? std::max(options.expert_slots, kSlotsMin) : std::max(c.n_routed_experts, kSlotsMin)};
  const DeviceMemory use = device.memory();
  room.left = use.budget_bytes - use.used_bytes;
  ASSIGN_OR_RETURN(m.sizes, ChooseSlpSizes(room));

  ASSIGN_OR_RETURN(m.sub_layers, DeviceRing::Make(device, kSubLayerSlots, plan.sub_layer_bytes_max()));
  if (has_experts) {
    ASSIGN_OR_RETURN(m.experts, DeviceRing::Make(device, m.sizes.expert_slots, plan.expert_bytes_max()));
    ASSIGN_OR_RETURN(m.expert_room, device.Allocate(expert_room));
  }
  for (const Width& width : of_all) {
    ASSIGN_OR_RETURN(*width.buffer, device.Allocate(static_cast<size_t>(m.sizes.rows * width.row_bytes)));
  }
  m.own_rows_max = CeilDiv(m.sizes.rows, ranks) + (ranks > 1 ? kUnevenRows : 0);
  for (const Width& width : of_own) {
    ASSIGN_OR_RETURN(*width.buffer, device.Allocate(static_cast<size_t>(m.own_rows_max * width.row_bytes)));
  }
  if (count_bytes > 0) {
    ASSIGN_OR_RETURN(m.counts, device.Allocate(count_bytes));
  }
  if (end_bytes > 0) {
    ASSIGN_OR_RETURN(m.stripe_ends, device.Allocate(end_bytes));
  }
  return memory;
}

void SlpMemory::PointChunkAt(int64_t first, int64_t count) {
  ForwardWorkspace& w = *chunk;
  w.token_ids = Alias(token_ids, first, count, 4);
  w.residual = Alias(residual, first, count, 4 * hidden_);
  const int64_t seen = own_begin + first;
  w.normed = Alias(normed, seen, count, 2 * terms_ * hidden_);
  if (top_k_ == 0) return;
  w.expert_ids = Alias(expert_ids, seen, count, 4 * top_k_);
  w.expert_weights = Alias(expert_weights, seen, count, 4 * top_k_);
  w.moe = Alias(sums[0], seen, count, 4 * hidden_);
}

}  // namespace hearth
