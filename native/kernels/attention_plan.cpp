#include "kernels/attention_plan.h"

#include <algorithm>
#include <cstring>

namespace phloem {
namespace {

constexpr int kMostBlockRows = 64;  // beyond, sharing a tile saves little and the states leave the cache
constexpr int kLeastBlockRows = 8;
constexpr int kMostPartRows = 16;   // the states of blocks in parts are kept per super
constexpr int kUnitsPerThread = 6;  // enough for the last units to even out

// Leading tiles that both sequences see in full and that have equal slots.
int common_tiles(const StepRows& rows, int a, int b) {
  const int full_a = (rows.positions[rows.seq_row_start[a]] + 1) / kTile;
  const int full_b = (rows.positions[rows.seq_row_start[b]] + 1) / kTile;
  const int full = std::min(full_a, full_b);
  const int32_t* slots_a = rows.slot_table + rows.seq_table_row[a] * rows.ld_table;
  const int32_t* slots_b = rows.slot_table + rows.seq_table_row[b] * rows.ld_table;
  int t = 0;
  while (t < full && std::memcmp(slots_a + t * kTile, slots_b + t * kTile, kTile * sizeof(int32_t)) == 0) ++t;
  return t;
}

int supers_of(const StepRows& rows, int row_begin, int row_end) {
  const int longest = *std::max_element(rows.positions + row_begin, rows.positions + row_end);
  return longest / kSuper + 1;
}

// Long runs of rows are cut so that every thread has several units; at most so short that a tile is worth its loading.
int block_rows(const StepRows& rows, const AttentionShape& shape) {
  const int wanted = rows.num_rows * shape.num_kv_heads / (kUnitsPerThread * shape.num_threads);
  return std::clamp(wanted, kLeastBlockRows, kMostBlockRows);
}

void cut_blocks(const StepRows& rows, int most_rows, AttentionPlan& plan) {
  plan.blocks.clear();
  for (int s = 0; s < rows.num_seqs;) {
    int end = s + 1;
    while (end < rows.num_seqs && plan.shared_tiles[end] > 0 &&
           rows.seq_row_start[end + 1] - rows.seq_row_start[s] <= most_rows)
      ++end;
    const int last = rows.seq_row_start[end];
    for (int row = rows.seq_row_start[s]; row < last; row += most_rows) {
      const int row_end = std::min(row + most_rows, last);
      plan.blocks.push_back({row, row_end, s, end, supers_of(rows, row, row_end), 1, 0});
    }
    s = end;
  }
}

// Reorders units that follow each other so that threads that take turns each have a run of them: what a thread fetches
// ahead at the end of a unit is then what it needs next.
void deal(size_t num_threads, std::vector<AttentionUnit>& units, size_t begin, size_t end) {
  const std::vector<AttentionUnit> in_order(units.begin() + begin, units.begin() + end);
  const size_t share = (in_order.size() + num_threads - 1) / num_threads;
  for (size_t i = 0; i < share; ++i)
    for (size_t from = i; from < in_order.size(); from += share) units[begin++] = in_order[from];
}

void cut_units(const AttentionShape& shape, AttentionPlan& plan) {
  const int group = shape.num_heads / shape.num_kv_heads;
  const int wanted = kUnitsPerThread * shape.num_threads;
  const int uncut = static_cast<int>(plan.blocks.size()) * shape.num_kv_heads;
  const int parts = shape.num_threads > 1 && uncut < wanted ? (wanted + uncut - 1) / uncut : 1;
  plan.units.clear();
  plan.state_floats = 0;
  plan.most_query_rows = 0;
  for (size_t b = 0; b < plan.blocks.size(); ++b) {
    AttentionBlock& block = plan.blocks[b];
    const int num_rows = block.row_end - block.row_begin;
    plan.most_query_rows = std::max(plan.most_query_rows, num_rows * group);
    block.parts = num_rows <= kMostPartRows ? std::min(parts, block.supers) : 1;
    if (block.parts > 1) {
      block.state_offset = plan.state_floats;
      plan.state_floats += static_cast<int64_t>(shape.num_kv_heads) * block.supers * num_rows * group *
                           static_cast<int64_t>(attend_state_floats(shape.head_dim));
    }
    for (int head = 0; head < shape.num_kv_heads; ++head)
      for (int part = 0; part < block.parts; ++part)
        plan.units.push_back(
            {static_cast<int>(b), head, part * block.supers / block.parts, (part + 1) * block.supers / block.parts});
  }
  const auto cost = [&plan](const AttentionUnit& unit) {
    const AttentionBlock& block = plan.blocks[unit.block];
    return static_cast<int64_t>(unit.super_end - unit.super_begin) * (8 + block.row_end - block.row_begin);
  };
  std::stable_sort(plan.units.begin(), plan.units.end(),
                   [&cost](const AttentionUnit& a, const AttentionUnit& b) { return cost(a) > cost(b); });
  for (size_t begin = 0, end; begin < plan.units.size(); begin = end) {
    end = begin + 1;
    while (end < plan.units.size() && cost(plan.units[end]) == cost(plan.units[begin])) ++end;
    deal(shape.num_threads, plan.units, begin, end);
  }
}

}  // namespace

void plan_attention(const StepRows& rows, const AttentionShape& shape, AttentionPlan& plan) {
  plan.shared_tiles.assign(rows.num_seqs, 0);
  if (shape.group_shared_prefixes)
    for (int s = 1; s < rows.num_seqs; ++s) plan.shared_tiles[s] = common_tiles(rows, s - 1, s);
  cut_blocks(rows, block_rows(rows, shape), plan);
  cut_units(shape, plan);
}

}  // namespace phloem
