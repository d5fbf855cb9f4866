// Owns the Python face of the tree: borrows arrays, translates errors, guards the tree with one mutex. Must not know
// how the tree works. Arrays are checked here; what fails raises and has changed nothing.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "tree/page_pool.h"
#include "tree/shared_tree.h"

namespace nb = nanobind;

namespace phloem {
namespace {

// A borrowed one-dimensional contiguous array of T.
template <class T>
class Array {
 public:
  Array(nb::handle object, const char* name, bool writable = false) {
    const int flags = PyBUF_ND | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
      PyErr_Clear();
      throw CacheError(expected(name, writable) + ", got " +
                       nb::cast<std::string>(nb::str(nb::type_name(object.type()))) +
                       " that is not such an array; use numpy.ascontiguousarray(x, dtype)");
    }
    if (buffer_.ndim != 1 || buffer_.itemsize != sizeof(T) || !is_format(buffer_.format)) {
      const std::string got = std::string("format '") + (buffer_.format ? buffer_.format : "B") + "' in " +
                              std::to_string(buffer_.ndim) + " dimensions";
      PyBuffer_Release(&buffer_);
      throw CacheError(expected(name, writable) + ", got " + got + "; use numpy.ascontiguousarray(x, dtype)");
    }
  }
  ~Array() { PyBuffer_Release(&buffer_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() const { return static_cast<T*>(buffer_.buf); }
  size_t size() const { return static_cast<size_t>(buffer_.shape[0]); }

 private:
  static std::string expected(const char* name, bool writable) {
    const char* kind = sizeof(T) == 1 ? "uint8" : sizeof(T) == 4 ? "int32" : "int64";
    return std::string(name) + ": expected a " + (writable ? "writable " : "") + "contiguous one-dimensional " + kind +
           " array";
  }
  static bool is_format(const char* format) {
    if (format == nullptr || format[0] == '\0' || format[1] != '\0') return false;
    if (sizeof(T) == 1) return format[0] == 'B';
    return sizeof(T) == 4 ? format[0] == 'i' || format[0] == 'l' : format[0] == 'l' || format[0] == 'q';
  }

  Py_buffer buffer_;
};

Tokens tokens_of(const Array<int32_t>& array) {
  if (array.size() >= 0x7fffffffu)
    throw CacheError("tokens: expected fewer than 2^31, got " + std::to_string(array.size()));
  return {array.data(), static_cast<uint32_t>(array.size())};
}

Policy policy_of(const std::string& name) {
  const std::pair<const char*, Policy> policies[] = {{"lru", Policy::kLru},           {"lfu", Policy::kLfu},
                                                     {"slru", Policy::kSlru},         {"fifo", Policy::kFifo},
                                                     {"priority", Policy::kPriority}, {"gdsf", Policy::kGdsf}};
  for (const auto& [known, policy] : policies) {
    if (name == known) return policy;
  }
  throw CacheError("eviction_policy must be one of lru, lfu, slru, fifo, priority, gdsf, got '" + name + "'");
}

// The tree as Python sees it. Lookups in bulk and snapshots run without the GIL; nothing waits for the GIL while it
// holds the tree's mutex.
class Tree {
 public:
  Tree(int64_t num_pages, int64_t page_size, const std::string& policy, double evict_watermark, double pin_budget)
      : shared_(config(num_pages, page_size, policy, evict_watermark, pin_budget)) {}

  template <class Call>
  auto locked(Call call) {
    return shared_.locked(call);
  }

  SpaceId space(int64_t id) {
    if (id < 0 || id > 0x7fffffff) throw CacheError("unknown namespace id " + std::to_string(id));
    return static_cast<SpaceId>(id);
  }

  Match peek(int64_t space_id, nb::handle tokens, std::optional<Match> last) {
    const Array<int32_t> array(tokens, "tokens");
    const SpaceId s = space(space_id);
    return locked([&](RadixTree& tree) {
      tree.check_space(s);
      if (!last) return tree.peek(s, tokens_of(array));
      tree.check_match(s, *last);
      return tree.peek_again(s, tokens_of(array), *last);
    });
  }

  nb::list match_many(nb::list queries);

  nb::tuple append(CursorId cursor, nb::handle tokens, StepId step) {
    const Array<int32_t> array(tokens, "tokens");
    const AppendResult r = locked([&](RadixTree& tree) { return tree.append(cursor, tokens_of(array), step); });
    return nb::make_tuple(r.done, r.num_shared, r.moved_from);
  }

  size_t extend(nb::handle cursors, nb::handle tokens, StepId step, nb::handle slots, nb::handle writes,
                nb::handle moved);

  nb::tuple snapshot();
  nb::list take_events();

 private:
  static TreeConfig config(int64_t num_pages, int64_t page_size, const std::string& policy, double watermark,
                           double budget) {
    TreeConfig c;
    c.num_pages = num_pages < 0 || num_pages > 0x7fffffff ? 0 : static_cast<uint32_t>(num_pages);
    c.page_size = page_size < 0 || page_size > 256 ? 0 : static_cast<uint32_t>(page_size);
    c.policy = policy_of(policy);
    c.evict_watermark = watermark;
    c.pin_budget = budget;
    return c;
  }

  SharedTree shared_;
};

struct Query {
  size_t index;
  SpaceId space;
  Tokens tokens;
  Match last;
  bool has_last;
};

// First pass under the GIL: keep what is unchanged, note the others; then they are matched without it.
nb::list Tree::match_many(nb::list queries) {
  nb::list out;
  std::vector<Query> stale;
  std::vector<std::unique_ptr<Array<int32_t>>> arrays;
  locked([&](RadixTree& tree) {
    for (size_t i = 0; i < queries.size(); ++i) {
      PyObject* tuple = nb::handle(queries[i]).ptr();
      if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 3) {
        throw CacheError("match_many: expected (namespace id, tokens, probe or None) tuples");
      }
      const nb::handle probe(PyTuple_GET_ITEM(tuple, 2));
      const SpaceId s = space(nb::cast<int64_t>(nb::handle(PyTuple_GET_ITEM(tuple, 0))));
      Query query{i, s, {nullptr, 0}, {}, !probe.is_none()};
      tree.check_space(s);
      if (query.has_last) {
        if (!nb::isinstance<Match>(probe)) throw CacheError("match_many: expected a Probe or None as third item");
        query.last = *nb::inst_ptr<Match>(probe);
        tree.check_match(s, query.last);
        if (tree.unchanged(query.last)) {
          out.append(probe);
          continue;
        }
      }
      arrays.push_back(std::make_unique<Array<int32_t>>(nb::handle(PyTuple_GET_ITEM(tuple, 1)), "tokens"));
      query.tokens = tokens_of(*arrays.back());
      stale.push_back(query);
      out.append(nb::none());
    }
  });
  if (!stale.empty()) {
    const nb::gil_scoped_release release;
    locked([&](RadixTree& tree) {
      for (Query& q : stale) {
        q.last = q.has_last ? tree.peek_again(q.space, q.tokens, q.last) : tree.peek(q.space, q.tokens);
      }
    });
  }
  for (const Query& q : stale) out[q.index] = nb::cast(q.last);
  return out;
}

size_t Tree::extend(nb::handle cursors, nb::handle tokens, StepId step, nb::handle slots, nb::handle writes,
                    nb::handle moved) {
  const Array<int64_t> ids(cursors, "cursors");
  const Array<int32_t> toks(tokens, "tokens");
  const Array<int32_t> slots_out(slots, "slots_out", true);
  const Array<uint8_t> writes_out(writes, "writes_out", true);
  std::optional<Array<int32_t>> moved_out;
  if (!moved.is_none()) moved_out.emplace(moved, "moved_from_out", true);
  const size_t n = ids.size();
  if (toks.size() != n || slots_out.size() < n || writes_out.size() < n || (moved_out && moved_out->size() < n)) {
    throw CacheError("extend: expected one token and room for one result per cursor, got " + std::to_string(n) +
                     " cursors, " + std::to_string(toks.size()) + " tokens, room for " +
                     std::to_string(std::min(slots_out.size(), writes_out.size())));
  }
  return locked([&](RadixTree& tree) {
    for (size_t i = 0; i < n; ++i) tree.length(ids.data()[i]);
    for (size_t i = 0; i < n; ++i) {
      RadixTree::Extended e;
      if (!tree.extend(ids.data()[i], toks.data()[i], step, &e)) return i;
      slots_out.data()[i] = static_cast<int32_t>(e.slot);
      writes_out.data()[i] = e.write;
      if (moved_out) moved_out->data()[i] = static_cast<int32_t>(e.moved_from);
    }
    return n;
  });
}

constexpr size_t kViewColumns = 13;

// (rows of 13 int64, whether all are of one moment)
nb::tuple Tree::snapshot() {
  const SharedTree::Snapshot s = [&] {
    const nb::gil_scoped_release release;
    return shared_.snapshot();
  }();
  const std::vector<NodeView>& nodes = s.nodes;
  auto* rows = new int64_t[nodes.size() * kViewColumns];
  const nb::capsule owner(rows, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  for (size_t i = 0; i < nodes.size(); ++i) {
    const NodeView& v = nodes[i];
    const int64_t row[kViewColumns] = {v.node,
                                       v.parent == kNone ? -1 : int64_t{v.parent},
                                       v.generation,
                                       v.space,
                                       v.start,
                                       v.len,
                                       v.lock_ref,
                                       v.hits,
                                       v.num_children,
                                       v.num_pending,
                                       v.want_ref,
                                       v.pin_ref,
                                       static_cast<int64_t>(v.tick)};
    std::copy_n(row, kViewColumns, rows + i * kViewColumns);
  }
  return nb::make_tuple(nb::ndarray<nb::numpy, int64_t>(rows, {nodes.size(), kViewColumns}, owner), s.exact);
}

nb::object int32_array(const std::vector<int32_t>& values) {
  auto* data = new int32_t[values.size()];
  std::copy(values.begin(), values.end(), data);
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, int32_t>(data, {values.size()}, owner));
}

nb::bytes hash_bytes(const PrefixHash& hash) {
  const uint64_t words[2] = {hash.a, hash.b};
  return nb::bytes(reinterpret_cast<const char*>(words), sizeof(words));
}

nb::bytes prefix_hash(nb::handle tokens, std::optional<nb::bytes> parent) {
  const Array<int32_t> array(tokens, "tokens");
  PrefixHash hash;
  if (parent) {
    uint64_t words[2];
    if (parent->size() != sizeof(words)) {
      throw CacheError("parent: expected the 16 bytes of a prefix hash, got " + std::to_string(parent->size()));
    }
    std::memcpy(words, parent->c_str(), sizeof(words));
    hash = {words[0], words[1]};
  }
  hash.update(array.data(), array.size());
  return hash_bytes(hash);
}

// (kind, namespace id, position, 16 bytes of prefix hash, tokens)
nb::list Tree::take_events() {
  const std::vector<Event> events = locked([](RadixTree& tree) { return tree.take_events(); });
  nb::list out;
  for (const Event& e : events) {
    const char* kind = e.kind == EventKind::kStored ? "stored" : e.kind == EventKind::kRemoved ? "removed" : "cleared";
    out.append(nb::make_tuple(kind, e.space, e.position, hash_bytes(e.prefix), int32_array(e.tokens)));
  }
  return out;
}

nb::dict stats_dict(const TreeStats& s) {
  nb::dict d;
  const std::pair<const char*, uint64_t> fields[] = {
      {"num_pages_total", s.pages_total},
      {"num_pages_free", s.pages_free},
      {"num_pages_evictable", s.pages_evictable},
      {"num_pages_protected", s.pages_protected},
      {"num_pages_pending", s.pages_pending},
      {"num_pages_pinned", s.pages_pinned},
      {"num_nodes", s.nodes},
      {"num_tokens", s.tokens},
      {"num_tokens_pending", s.tokens_pending},
      {"num_cursors", s.cursors},
      {"num_pins", s.pins},
      {"num_wants", s.wants},
      {"num_namespaces", s.spaces},
      {"num_evicted_pages", s.evicted_pages},
      {"num_evicted_nodes", s.evicted_nodes},
      {"num_evicted_pinned_pages", s.evicted_pinned_pages},
      {"num_evicted_wanted_pages", s.evicted_wanted_pages},
      {"num_flushed_pages", s.flushed_pages},
      {"num_inserted_tokens", s.inserted_tokens},
      {"num_splits", s.splits},
      {"num_merges", s.merges},
      {"num_rounding_loss_tokens", s.rounding_loss_tokens},
      {"num_metadata_bytes", s.metadata_bytes},
  };
  for (const auto& [name, value] : fields) d[name] = value;
  return d;
}

uint32_t checked_count(int64_t n, const char* what) {
  if (n < 0) throw CacheError(std::string(what) + " must be at least 0, got " + std::to_string(n));
  return static_cast<uint32_t>(std::min<int64_t>(n, 0xffffffff));
}

void translate(const std::exception_ptr& p, void*) {
  const auto raise = [](const char* name, const std::exception& e) {
    const nb::object type = nb::module_::import_("phloem.errors").attr(name);
    PyErr_SetString(type.ptr(), e.what());
  };
  try {
    std::rethrow_exception(p);
  } catch (const StaleHandleError& e) {
    raise("StaleHandleError", e);
  } catch (const CapacityError& e) {
    raise("CapacityError", e);
  } catch (const CacheError& e) {
    raise("CacheError", e);
  }
}

void bind_cursors(nb::class_<Tree>& c) {
  c.def("open",
        [](Tree& t, int64_t space, nb::handle tokens, int32_t priority) {
          const Array<int32_t> array(tokens, "tokens");
          const SpaceId s = t.space(space);
          const auto r = t.locked([&](RadixTree& tree) { return tree.open(s, tokens_of(array), priority); });
          return std::make_tuple(r.cursor, r.length);
        })
      .def("advance",
           [](Tree& t, CursorId cursor, nb::handle tokens) {
             const Array<int32_t> array(tokens, "tokens");
             return t.locked([&](RadixTree& tree) { return tree.advance(cursor, tokens_of(array)); });
           })
      .def("append", &Tree::append)
      .def("extend", &Tree::extend, nb::arg("cursors"), nb::arg("tokens"), nb::arg("step_id"), nb::arg("slots_out"),
           nb::arg("writes_out"), nb::arg("moved_from_out").none())
      .def("length",
           [](Tree& t, CursorId cursor) { return t.locked([&](RadixTree& tree) { return tree.length(cursor); }); })
      .def("fork",
           [](Tree& t, CursorId cursor) { return t.locked([&](RadixTree& tree) { return tree.fork(cursor); }); })
      .def("close", [](Tree& t, CursorId cursor) { t.locked([&](RadixTree& tree) { tree.close(cursor); }); })
      .def("fill_slots",
           [](Tree& t, CursorId cursor, int64_t start, nb::handle out) {
             const Array<int32_t> array(out, "out", true);
             const uint32_t first = checked_count(start, "start");
             t.locked([&](RadixTree& tree) { tree.fill_slots(cursor, first, array.data(), array.size()); });
           })
      .def("complete", [](Tree& t, StepId step) { t.locked([&](RadixTree& tree) { tree.complete(step); }); })
      .def("discard", [](Tree& t, StepId step) { t.locked([&](RadixTree& tree) { tree.discard(step); }); });
}

void bind_space(nb::class_<Tree>& c) {
  c.def("want",
        [](Tree& t, int64_t space, nb::handle tokens) {
          const Array<int32_t> array(tokens, "tokens");
          const SpaceId s = t.space(space);
          return t.locked([&](RadixTree& tree) { return tree.want(s, tokens_of(array)); });
        })
      .def("unwant", [](Tree& t, MarkId want) { t.locked([&](RadixTree& tree) { tree.unwant(want); }); })
      .def("pin",
           [](Tree& t, int64_t space, nb::handle tokens, double expires_at) {
             const Array<int32_t> array(tokens, "tokens");
             const SpaceId s = t.space(space);
             uint32_t length = 0;
             const MarkId id =
                 t.locked([&](RadixTree& tree) { return tree.pin(s, tokens_of(array), expires_at, &length); });
             return std::make_tuple(id, length);
           })
      .def("unpin", [](Tree& t, MarkId pin) { t.locked([&](RadixTree& tree) { tree.unpin(pin); }); })
      .def("expire_pins",
           [](Tree& t, double now) { return t.locked([&](RadixTree& tree) { return tree.expire_pins(now); }); })
      .def("evict",
           [](Tree& t, int64_t n) {
             const uint32_t count = checked_count(n, "num_pages");
             return t.locked([&](RadixTree& tree) { return tree.evict(count); });
           })
      .def("flush_all", [](Tree& t) { return t.locked([](RadixTree& tree) { return tree.flush_all(); }); })
      .def("flush_space",
           [](Tree& t, int64_t space) {
             const SpaceId s = t.space(space);
             return t.locked([&](RadixTree& tree) { return tree.flush_space(s); });
           })
      .def("flush_prefix", [](Tree& t, int64_t space, nb::handle prefix) {
        const Array<int32_t> array(prefix, "prefix");
        const SpaceId s = t.space(space);
        return t.locked([&](RadixTree& tree) { return tree.flush_prefix(s, tokens_of(array)); });
      });
}

void bind_views(nb::class_<Tree>& c) {
  c.def("stats", [](Tree& t) { return stats_dict(t.locked([](RadixTree& tree) { return tree.stats(); })); })
      .def("num_free", [](Tree& t) { return t.locked([](RadixTree& tree) { return tree.num_free(); }); })
      .def("num_available",
           [](Tree& t) { return t.locked([](RadixTree& tree) { return tree.num_free() + tree.num_evictable(); }); })
      .def("check_invariants",
           [](Tree& t) { return t.locked([](RadixTree& tree) { return tree.check_invariants(); }); })
      .def("snapshot", &Tree::snapshot)
      .def("listen", [](Tree& t, bool on) { t.locked([&](RadixTree& tree) { tree.listen(on); }); })
      .def("take_events", &Tree::take_events);
}

void bind_pool(nb::module_& m) {
  nb::class_<CheckedPagePool>(m, "PagePool")
      .def("__init__",
           [](CheckedPagePool* self, int64_t num_pages) {
             if (num_pages < 1 || num_pages > 0x7ffffffe) {
               throw CacheError("num_pages must be from 1 to 2^31-2, got " + std::to_string(num_pages));
             }
             new (self) CheckedPagePool(static_cast<uint32_t>(num_pages));
           })
      .def("allocate",
           [](CheckedPagePool& pool, int64_t n) -> nb::object {
             const uint32_t count = checked_count(n, "n");
             if (count > pool.num_pages()) {
               throw CapacityError("cannot allocate " + std::to_string(n) + " pages: the pool has " +
                                   std::to_string(pool.num_pages()));
             }
             std::vector<int32_t> ids(count);
             if (!pool.allocate(count, reinterpret_cast<PageId*>(ids.data()))) return nb::none();
             return int32_array(ids);
           })
      .def("free",
           [](CheckedPagePool& pool, nb::handle pages) {
             const Array<int32_t> array(pages, "pages");
             pool.free(reinterpret_cast<const PageId*>(array.data()), static_cast<uint32_t>(array.size()));
           })
      .def_prop_ro("num_free", &CheckedPagePool::num_free)
      .def_prop_ro("num_pages", &CheckedPagePool::num_pages);
}

}  // namespace

NB_MODULE(_tree, m) {
  m.doc() = "Native radix tree and page pool; the typed face is phloem.kv.";
  nb::register_exception_translator(translate);
  nb::class_<Match>(m, "Probe")
      .def_ro("length", &Match::length)
      .def_ro("node", &Match::node)
      .def_ro("generation", &Match::generation)
      .def_ro("epoch", &Match::epoch)
      .def("__repr__", [](const Match& p) {
        return "Probe(length=" + std::to_string(p.length) + ", node=" + std::to_string(p.node) +
               ", generation=" + std::to_string(p.generation) + ", epoch=" + std::to_string(p.epoch) + ")";
      });
  m.def("prefix_hash", &prefix_hash, nb::arg("tokens"), nb::arg("parent") = nb::none());
  bind_pool(m);
  nb::class_<Tree> tree(m, "RadixTree");
  tree.def(nb::init<int64_t, int64_t, const std::string&, double, double>())
      .def("create_space", [](Tree& t) { return t.locked([](RadixTree& r) { return r.create_space(); }); })
      .def("peek", &Tree::peek, nb::arg("space_id"), nb::arg("tokens"), nb::arg("last") = nb::none())
      .def("match_many", &Tree::match_many);
  bind_cursors(tree);
  bind_space(tree);
  bind_views(tree);
}

}  // namespace phloem
