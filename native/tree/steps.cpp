// Owns what steps have inserted and not yet completed. Must not know how tokens got in.

#include <algorithm>
#include <cassert>

#include "tree/radix_tree.h"

namespace phloem {

RadixTree::Step& RadixTree::step_at(StepId id) {
  for (Step& step : steps_) {
    if (step.id == id) return step;
  }
  steps_.push_back({id, {}});
  return steps_.back();
}

// The tokens of a record are computed. Splits since then may have spread them over several nodes.
void RadixTree::settle(const Record& record) {
  for (NodeId id = record.node; !is_root(id); id = hot(id).parent) {
    NodeHot& h = hot(id);
    const uint32_t settled = record.to > h.start ? std::min(h.len, record.to - h.start) : 0;
    if (h.pending_from < settled) {
      const uint32_t from = h.start + h.pending_from;
      account(id, -1);
      h.pending_from = settled;
      account(id, +1);
      emit(EventKind::kStored, id, floor(from), h.start + settled);
    }
    if (h.start <= record.from) break;
  }
}

// Closed cursors let go as soon as nothing of their node is pending.
void RadixTree::release_zombies() {
  size_t kept = 0;
  for (size_t i = 0; i < zombies_.size(); ++i) {
    const NodeId node = zombies_[i];
    if (hot(node).pending_from < hot(node).len) {
      zombies_[kept++] = node;
    } else {
      release(node);
    }
  }
  zombies_.resize(kept);
}

void RadixTree::complete(StepId id) {
  size_t index = 0;
  while (index < steps_.size() && steps_[index].id != id) ++index;
  if (index == steps_.size()) return;
  if (index > 0) {
    throw CacheError("step " + std::to_string(id) + " cannot complete before step " + std::to_string(steps_[0].id) +
                     ": complete steps in the order they were built, or discard the older one");
  }
  const std::vector<Record> records = std::move(steps_[0].records);
  steps_.erase(steps_.begin());
  for (const Record& record : records) {
    if (nodes_.alive(record.node, record.generation)) settle(record);
  }
  for (const Record& record : records) {
    if (!nodes_.alive(record.node, record.generation)) continue;
    NodeId node = record.node;
    if (hot(node).num_children == 1) {
      const NodeId child = hot(node).first_child;
      if (try_merge(child)) node = child;
    }
    while (!is_root(node) && end(node) > record.from) {
      if (!try_merge(node)) node = hot(node).parent;
    }
  }
  release_zombies();
  ++version_;
}

// Records that name a node with pending tokens, about to go, name its parent for what they cover of that.
void RadixTree::lift_records(NodeId from) {
  const NodeId parent = hot(from).parent;
  for (Step& step : steps_) {
    for (Record& record : step.records) {
      if (record.node != from || record.generation != hot(from).generation) continue;
      record.node = record.from < hot(from).start ? parent : kNone;
      record.generation = hot(parent).generation;
      record.to = std::min(record.to, hot(from).start);
    }
  }
}

// The node that holds the first token of a record, or kNone if that is gone.
NodeId RadixTree::discarded_top(const Record& record) const {
  if (!nodes_.alive(record.node, record.generation)) return kNone;
  NodeId id = record.node;
  while (!is_root(id) && hot(id).start > record.from) id = hot(id).parent;
  return record.from < end(id) ? id : kNone;
}

void RadixTree::check_discardable(const Step& step) const {
  std::unordered_map<NodeId, uint32_t> first_gone;
  for (const Record& record : step.records) {
    const NodeId top = discarded_top(record);
    if (top == kNone) continue;
    const auto [entry, fresh] = first_gone.emplace(top, record.from);
    if (!fresh) entry->second = std::min(entry->second, record.from);
  }
  std::string open;
  for (size_t i = 0; i < cursors_.size(); ++i) {
    if (!cursors_[i].open) continue;
    for (NodeId id = cursors_[i].node; id != kNone; id = hot(id).parent) {
      if (!first_gone.contains(id)) continue;
      open += (open.empty() ? "" : ", ") + std::to_string(uint64_t{cursors_[i].generation} << 32 | i);
      break;
    }
  }
  if (!open.empty()) {
    throw CacheError("step " + std::to_string(step.id) +
                     " cannot be discarded while cursors stand on its tokens: close " + open + " first");
  }
}

void RadixTree::remove_subtree(NodeId top) {
  for (NodeId id = top;;) {
    if (hot(id).num_children > 0) {
      id = hot(id).first_child;
      continue;
    }
    const NodeId parent = hot(id).parent;
    remove_leaf(id);
    if (id == top) return;
    id = parent;
  }
}

// Only closed cursors hold what goes; they step back before it and wait on for what is pending there. The page that
// the record begins in goes whole: nobody is left to fill it.
void RadixTree::discard_record(const Record& record) {
  const NodeId top = discarded_top(record);
  if (top == kNone) return;
  const uint32_t keep = floor(record.from) - hot(top).start;
  const NodeId parent = hot(top).parent;
  for (NodeId& zombie : zombies_) {
    for (NodeId at = zombie; at != kNone; at = hot(at).parent) {
      if (at == top) zombie = keep > 0 ? top : parent;
    }
  }
  while (hot(top).num_children > 0) remove_subtree(hot(top).first_child);
  if (keep > 0) {
    truncate(top, keep);
    try_merge(top);
  } else {
    remove_leaf(top);
    after_child_removed(parent);
  }
}

void RadixTree::discard(StepId id) {
  size_t index = 0;
  while (index < steps_.size() && steps_[index].id != id) ++index;
  if (index == steps_.size()) return;
  check_discardable(steps_[index]);
  // Copies, one at a time: removing a node changes the records that name it.
  for (size_t i = 0; i < steps_[index].records.size(); ++i) discard_record(Record(steps_[index].records[i]));
  steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(index));
  for (Step& step : steps_) {
    std::erase_if(step.records, [&](Record& record) {
      if (!nodes_.alive(record.node, record.generation)) return true;
      record.to = std::min(record.to, end(record.node));
      return record.from >= record.to;
    });
  }
  release_zombies();
  ++version_;
}

}  // namespace phloem
