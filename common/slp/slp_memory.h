// All device memory of a prefill engine that streams weights, allocated once: what a pass keeps of every row, the work room of one chunk, the two rings.
// Rows and the expert ring share a piece that is divided anew for each pass: a short prompt leaves the ring a whole layer's slots where a long one leaves two.
// Room: common/slp. May touch: common/{model,device,base}. Threads: the pass's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "common/base/status.h"
#include "common/device/collectives.h"
#include "common/device/device.h"
#include "common/experts/expert_source.h"
#include "common/model/forward.h"
#include "common/model/workspace.h"
#include "common/slp/device_ring.h"
#include "common/slp/expert_exchange.h"
#include "common/slp/weight_plan.h"

namespace hearth {

struct SlpOptions {
  int64_t chunk_rows = 0;  // rows that are worked on at once: bounds the work room, moves no bit; 0: what the device likes, halved until it fits well
  int64_t max_rows = 32768;  // rows of a pass; fewer where the budget holds no more
  bool with_logits = false;  // room for logits, of a chunk's rows
  int64_t expert_slots = 0;  // of the expert ring at most; 0: a layer's experts
  // Where the loader gets experts from; null: from the model's own source. It has the records of that one, and nobody else uses it.
  std::shared_ptr<ExpertSource> experts = nullptr;
  // That share passes (DSLP): 2 or 4 of them, all made with the same options; 1: none.
  int64_t ranks = 1;
  ExpertExchange exchange = ExpertExchange::kSmallEp;
};

struct SlpSizes {
  int64_t rows = 0;           // of a pass at most
  uint64_t shared_bytes = 0;  // for rows and slots
};

// What there is for rows and slots.
struct SlpRoom {
  uint64_t left = 0;        // bytes of the budget
  uint64_t fixed = 0;       // needed whatever is chosen
  uint64_t row_bytes = 0;   // of a pass, each
  uint64_t slot_bytes = 0;  // of the expert ring, each; 0: no ring
  int64_t rows_min = 1, rows_max = 1;
  int64_t slots_max = 2;  // at least 2: one is filled while the other is read

  uint64_t bytes_min() const;  // of `left`, that will do
};

// As many rows as are wanted beside two slots: a row that does not fit costs another pass over all weights, a slot less only makes the link idle while the
// attention of a layer is computed. ResourceExhausted, with what would do, where not even rows_min and two slots fit.
absl::StatusOr<SlpSizes> ChooseSlpSizes(const SlpRoom& room);

// Whose memory is arranged: a pass alone, or a rank's part of one that ranks share.
struct PassShape {
  int64_t own_rows = 0;  // that this rank computes
  int64_t all_rows = 0;
  int64_t ranks = 1;
  int64_t experts = 0;  // of a layer, that this rank loads
};

struct SlpMemory {
  // Takes what the device's budget has left. Errors: ResourceExhausted, before anything is taken.
  static absl::StatusOr<std::unique_ptr<SlpMemory>> Make(Device& device, const Model& model, const WeightPlan& plan, const SlpOptions& options);
  // How many bytes Make must find left.
  static uint64_t BytesMin(const DeviceCaps& caps, const Model& model, const WeightPlan& plan, const SlpOptions& options);

  // A pass alone of at most sizes.rows has room; a shared one of as many may not, if its ranks' parts are too uneven.
  bool HasRoomFor(const PassShape& pass) const;
  // Slots of the expert ring in a pass that has room; 0 without routed experts.
  int64_t SlotsFor(const PassShape& pass) const;
  // Divides the shared piece, for a pass that has room. What the last one kept there is gone.
  void Arrange(const PassShape& pass);

  // The chunk workspace's rows become rows [first, first + count) of those that this rank computes: what is kept of every row is aliased there.
  void PointChunkAt(int64_t first, int64_t count);

  SlpSizes sizes;
  uint64_t work_bytes = 0;  // of the budget, for the work on one chunk
  // Where the rank's own rows begin among those that its experts see: all ranks', by rank, with SmallEP; else its own, and 0. The pass sets it.
  int64_t own_begin = 0;
  std::unique_ptr<ForwardWorkspace> chunk;
  std::unique_ptr<DeviceRing> sub_layers;  // four slots of the largest
  std::unique_ptr<DeviceRing> experts;     // null without routed experts; has its slots from Arrange

  // In the shared piece, [the rank's rows, ...]:
  Buffer token_ids;  // i32
  Buffer residual;   // f32 [hidden]
  // [rows that the rank's experts see, ...]: all ranks' with SmallEP, its own otherwise
  Buffer normed;             // bf16 [terms, hidden]
  Buffer expert_ids;         // i32 [top_k]
  Buffer expert_weights;     // f32 [top_k]
  Buffer rows_by_expert;     // i32 [top_k]: ExpertGroups on the device
  Buffer weights_by_expert;  // f32 [top_k]
  // f32 [hidden], of id-quarters; the first ends as the sum of all experts. With SmallEP the second is where the other ranks' partial sums come to, and
  // there is no third.
  std::array<Buffer, 3> sums;

  // With dispatch, [the rank's rows, top_k, ...]:
  Buffer own_rows_by_expert;     // i32
  Buffer own_weights_by_expert;  // f32
  Buffer sent;                   // bf16 [terms, hidden]: copies of rows, by the expert that they go to
  Buffer returned;               // f32 [hidden]: what came back, in the same order
  // and [all rows, top_k, ...], since all may choose the experts of one rank:
  Buffer received;  // bf16 [terms, hidden]
  Buffer outputs;   // f32 [hidden]

  Buffer counts;       // with dispatch, i32 [ranks, experts]
  Buffer stripe_ends;  // f32 [2 ranks, hidden]: hidden states, of one sequence's stripes

  Buffer expert_room;  // ExpertRows works here

 private:
  // What a buffer of the shared piece has a row for.
  enum class RowOf { kOwn, kSeen, kAll, kThirdSum, kSent, kReceived };
  struct Width {
    Buffer* buffer;
    int64_t row_bytes;
    RowOf row_of;
  };
  uint64_t BytesOf(const Width& width, const PassShape& pass) const;
  uint64_t RowsBytes(const PassShape& pass) const;
  struct Layout;
  // Says what there will be, and in the members below how it is divided; takes nothing.
  Layout LayOut(const DeviceCaps& caps, const Model& model, const WeightPlan& plan, const SlpOptions& options);

  bool dispatch_ = false;
  int64_t hidden_ = 0, terms_ = 0, top_k_ = 0;
  Buffer sub_layer_slots_;
  Buffer shared_;
  std::vector<Width> widths_;
  uint64_t slot_step_ = 0;
  int64_t slots_max_ = 0;  // 0: a layer's experts
};

}  // namespace hearth
