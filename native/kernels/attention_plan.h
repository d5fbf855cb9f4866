// Which rows attend together and how the work is cut: made once per step from positions and slot tables, used by every
// layer. Owns policy of grouping and cutting; no cut changes a result. Must not know K/V or layers.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"

namespace phloem {

// One step's rows as the scheduler plans them (shapes as in types.StepPlan).
struct StepRows {
  int num_rows, num_seqs, num_tables;
  const int32_t *token_ids, *positions, *write_slots;
  const int32_t *seq_row_start, *seq_table_row, *slot_table;
  int64_t ld_table;
};

struct AttentionBlock {
  int row_begin, row_end, seq_begin, seq_end;
  int supers;            // of its longest row
  int parts;             // units per K/V head; states of more than one are folded by the last to finish
  int64_t state_offset;  // floats, of a block in parts: [kv_heads, supers, query rows, state]
};

struct AttentionUnit {
  int block, kv_head, super_begin, super_end;
};

struct AttentionPlan {
  std::vector<AttentionBlock> blocks;
  std::vector<AttentionUnit> units;   // costly ones first
  std::vector<int32_t> shared_tiles;  // per sequence: leading full tiles in common with the one before
  int64_t state_floats = 0;
  int most_query_rows = 0;  // of a block, per K/V head
};

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim, num_threads;
  bool group_shared_prefixes;
};

// Reuses the vectors of `plan`. Cost: O(rows + tokens in slot tables of neighbours).
void plan_attention(const StepRows& rows, const AttentionShape& shape, AttentionPlan& plan);

}  // namespace phloem
