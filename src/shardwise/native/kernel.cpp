// Ops on DTensors whose blocks need not move, without Python: one boxed kernel per op at the Python dispatch key.
//
// A call is looked up by the specs of its DTensors and by its other arguments. If Python has said that such calls are
// direct, the op runs on the blocks, and its results are wrapped. Every other call goes to `__torch_dispatch__`, as if this
// kernel were not there; afterwards Python is asked once whether calls like it are direct.
#include <torch/extension.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <memory>
#include <structmember.h>
#include <unordered_map>
#include <vector>

namespace {

using c10::IValue;
using Key = std::vector<int64_t>;

enum class Kind { python, direct, in_place, view };

// What Python said of calls with one key. All objects are strong references.
struct Recipe {
  Kind kind = Kind::python;
  std::vector<PyObject*> specs;  // of the results
  std::vector<PyObject*> kept;   // the specs in the key, so that no other object gets their addresses
  std::vector<int64_t> shape;    // of the block that a view returns

  Recipe() = default;
  Recipe(const Recipe&) = delete;
  Recipe& operator=(const Recipe&) = delete;
  ~Recipe() {
    for (PyObject* spec : specs) Py_DECREF(spec);
    for (PyObject* spec : kept) Py_DECREF(spec);
  }
};

using RecipeRef = std::shared_ptr<Recipe>;  // a call keeps its recipe while others forget it

struct HashOfKey {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603ULL;
    for (int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 1099511628211ULL;
    return static_cast<size_t>(hash);
  }
};

constexpr size_t kMaxRecipes = 4096;  // per op, as in Python

// What Python gives once: the class, where its slots are, and the objects that are read on every call.
struct Shared {
  PyTypeObject* type = nullptr;
  Py_ssize_t block_offset = 0, spec_offset = 0;
  PyObject* new_dtensor = nullptr;
  PyObject* active = nullptr;            // the context variable of the settings
  PyObject* settings = nullptr;          // the only settings that recipes are for
  PyObject* watched = nullptr;           // a dict; not empty while views with memory of their own exist
  PyObject* inference_tensors = nullptr; // a set; not empty once DTensors of inference mode may exist
  int64_t calls = 0;                     // that ran without Python
};

Shared shared;

struct Op {
  bool by_type = false;  // its rule reads no numbers: keys have their types only
  std::unordered_map<Key, RecipeRef, HashOfKey> recipes;
  c10::RegistrationHandleRAII registration{[] {}};
};

std::unordered_map<PyObject*, std::unique_ptr<Op>> ops;

PyObject* slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// The Python object of a DTensor, borrowed; null for all other tensors, subclasses among them.
PyObject* dtensor_of(const at::Tensor& x) {
  PyObject* object = x.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  if (object == nullptr || Py_TYPE(object) != shared.type) return nullptr;
  if (slot(object, shared.block_offset) == nullptr || slot(object, shared.spec_offset) == nullptr) return nullptr;
  return object;
}

enum Tag : int64_t { tag_none, tag_spec, tag_int, tag_bool, tag_double, tag_number, tag_ints, tag_tensors, tag_text, tag_device };

int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Appends a tensor's part of the key; false where Python must run the call.
bool add_tensor(const at::Tensor& x, bool by_type, Key& key) {
  if (!x.defined()) {
    key.push_back(tag_none);
    return true;
  }
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) {  // Python would see a number
    const auto dtype = x.scalar_type();
    if (c10::isComplexType(dtype)) return false;
    key.push_back(tag_number);
    key.push_back(static_cast<int64_t>(dtype));
    if (!by_type) {
      key.push_back(c10::isFloatingType(dtype) ? bits_of(x.item<double>()) : x.item<int64_t>());
    }
    return true;
  }
  PyObject* object = dtensor_of(x);
  if (object == nullptr) return false;
  key.push_back(tag_spec);
  key.push_back(reinterpret_cast<int64_t>(slot(object, shared.spec_offset)));
  return true;
}

bool add_argument(const IValue& value, bool by_type, Key& key) {
  if (value.isTensor()) return add_tensor(value.toTensor(), by_type, key);
  if (value.isNone()) {
    key.push_back(tag_none);
  } else if (value.isInt()) {
    key.push_back(tag_int);
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(tag_bool);
    key.push_back(value.toBool());
  } else if (value.isDouble()) {
    key.push_back(tag_double);
    if (!by_type) key.push_back(bits_of(value.toDouble()));
  } else if (value.isIntList()) {
    const auto list = value.toIntList();
    key.push_back(tag_ints);
    key.push_back(static_cast<int64_t>(list.size()));
    for (int64_t i : list) key.push_back(i);
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    key.push_back(tag_text);
    key.push_back(static_cast<int64_t>(text.size()));
    for (char letter : text) key.push_back(letter);
  } else if (value.isDevice()) {
    key.push_back(tag_device);
    key.push_back(static_cast<int64_t>(value.toDevice().type()));
    key.push_back(value.toDevice().index());
  } else if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    key.push_back(tag_tensors);
    key.push_back(static_cast<int64_t>(list.size()));
    for (const at::Tensor& x : list) {
      if (!x.defined() || !add_tensor(x, by_type, key)) return false;
    }
  } else {
    return false;
  }
  return true;
}

bool is_common_state() {
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0 || c10::InferenceMode::is_enabled()) return false;
  if (PyDict_GET_SIZE(shared.watched) != 0 || PySet_GET_SIZE(shared.inference_tensors) != 0) return false;
  PyObject* settings = nullptr;
  if (PyContextVar_Get(shared.active, nullptr, &settings) < 0) {
    PyErr_Clear();
    return false;
  }
  Py_XDECREF(settings);
  return settings == shared.settings;
}

const at::Tensor& block_of(const at::Tensor& x) {
  return THPVariable_Unpack(slot(dtensor_of(x), shared.block_offset));
}

bool is_dtensor(const at::Tensor& x) {
  return x.defined() && !x.unsafeGetTensorImpl()->is_wrapped_number();
}

at::Tensor wrap(const at::Tensor& block, PyObject* spec) {
  PyObject* inner = THPVariable_Wrap(block);
  if (inner == nullptr) throw python_error();
  PyObject* arguments[] = {reinterpret_cast<PyObject*>(shared.type), inner, spec, Py_False};
  PyObject* out = PyObject_Vectorcall(shared.new_dtensor, arguments, 4, nullptr);
  Py_DECREF(inner);
  if (out == nullptr) throw python_error();
  at::Tensor result = THPVariable_Unpack(out);
  Py_DECREF(out);
  return result;
}

// What torch's own fallback at the Python key does: a mode, or the class of an argument, runs the op.
void run_in_python(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const int64_t modes = c10::impl::TorchDispatchModeTLS::stack_len();
  if (modes > 0) {
    c10::impl::TorchDispatchModeTLS::get_stack_at(modes - 1)->pyinterpreter()->dispatch(op, stack);
  } else {
    (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
  }
}

// A call whose key is new: Python runs it, and then says whether calls like it are direct.
struct Question {
  Op* op = nullptr;
  Key key;
  RecipeRef recipe;
};

thread_local std::unique_ptr<Question> question;           // of the call that Python is about to run
std::unordered_map<int64_t, std::unique_ptr<Question>> open_questions;  // that Python has taken
int64_t number_of_questions = 0;

void forget(Op& op) {
  const auto recipes = std::move(op.recipes);  // emptied first: the end of a spec may run Python code
  op.recipes.clear();
}

void keep(Recipe& recipe, const at::Tensor& x) {
  if (!is_dtensor(x)) return;
  PyObject* spec = slot(dtensor_of(x), shared.spec_offset);
  Py_INCREF(spec);
  recipe.kept.push_back(spec);
}

void ask(Op& own, Key key, at::ArrayRef<IValue> arguments) {
  auto recipe = std::make_shared<Recipe>();
  for (const IValue& value : arguments) {
    if (value.isTensor()) keep(*recipe, value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& x : value.toTensorVector()) keep(*recipe, x);
    }
  }
  question = std::make_unique<Question>(Question{&own, std::move(key), std::move(recipe)});
}

// Wraps the results of the op, which are the last of the stack.
void wrap_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, const Recipe& recipe) {
  const size_t count = op.schema().returns().size();
  size_t next = 0;
  const auto wrapped = [&](const at::Tensor& block) {
    TORCH_CHECK(next < recipe.specs.size(), "shardwise: ", op.schema().name(), " returned more tensors than it should");
    return wrap(block, recipe.specs[next++]);
  };
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = wrapped(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& block : value.toTensorVector()) list.push_back(wrapped(block));
      value = std::move(list);
    }
  }
}

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

class WithoutGil {
 public:
  explicit WithoutGil(bool release) : state_(release ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

constexpr int64_t kLarge = 1 << 14;  // elements; ops on smaller blocks take less time than to let other threads run

// Runs a call on the blocks; false, with the stack as it was, where the op refused them: Python says why.
bool run_on_blocks(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t count, const Recipe& recipe) {
  const size_t start = stack->size() - count;
  const torch::jit::Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(start), stack->end());
  int64_t elements = 0;
  for (size_t i = start; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor() && is_dtensor(value.toTensor())) {
      value = block_of(value.toTensor());
      elements += value.toTensor().numel();
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorVector()) {
        list.push_back(block_of(x));
        elements += list.get(list.size() - 1).numel();
      }
      value = std::move(list);
    }
  }
  try {
    const WithoutGil released(elements > kLarge);
    if (recipe.kind == Kind::view) {
      at::Tensor view = (*stack)[start].toTensor().view(recipe.shape);
      stack->resize(start);
      stack->emplace_back(std::move(view));
    } else {
      op.callBoxed(stack);
    }
  } catch (const std::exception&) {
    stack->resize(start);
    stack->insert(stack->end(), arguments.begin(), arguments.end());
    return false;
  }
  if (recipe.kind == Kind::in_place) {
    stack->back() = arguments.front();
  } else {
    wrap_results(op, stack, recipe);
  }
  return true;
}

constexpr c10::DispatchKeySet after_python =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
     c10::DispatchKeySet(c10::DispatchKey::Python));

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(Op* own) : own_(own) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard below_autograd(after_python);
    {
      const WithGil gil;
      if (is_common_state() && run_directly(op, stack)) return;
    }
    run_in_python(op, stack);
  }

 private:
  bool run_directly(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    Key key;
    key.reserve(16);
    for (const IValue& value : arguments) {
      if (!add_argument(value, own_->by_type, key)) return false;
    }
    const auto known = own_->recipes.find(key);
    if (known == own_->recipes.end()) {
      ask(*own_, std::move(key), arguments);
      return false;
    }
    const RecipeRef recipe = known->second;
    if (recipe->kind == Kind::python) return false;
    if (!run_on_blocks(op, stack, count, *recipe)) return false;
    ++shared.calls;
    return true;
  }

  Op* own_;
};

Py_ssize_t offset_of(const py::object& member) {
  if (Py_TYPE(member.ptr()) != &PyMemberDescr_Type) throw py::type_error("this is no slot of DTensor");
  return reinterpret_cast<PyMemberDescrObject*>(member.ptr())->d_member->offset;
}

void set_up(
    const py::object& cls,
    const py::object& block_slot,
    const py::object& spec_slot,
    const py::object& new_dtensor,
    const py::object& active,
    const py::object& settings,
    const py::object& watched,
    const py::object& inference_tensors) {
  shared.type = reinterpret_cast<PyTypeObject*>(cls.inc_ref().ptr());
  shared.block_offset = offset_of(block_slot);
  shared.spec_offset = offset_of(spec_slot);
  shared.new_dtensor = new_dtensor.inc_ref().ptr();
  shared.active = active.inc_ref().ptr();
  shared.settings = settings.inc_ref().ptr();
  shared.watched = watched.inc_ref().ptr();
  shared.inference_tensors = inference_tensors.inc_ref().ptr();
}

void register_op(const py::object& func, const std::string& name, const std::string& overload, bool by_type) {
  if (ops.count(func.ptr()) != 0) return;
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  auto own = std::make_unique<Op>();
  own->by_type = by_type;
  own->registration = c10::Dispatcher::singleton().registerImpl(
      handle.operator_name(),
      c10::DispatchKey::Python,
      c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(own.get())),
      std::nullopt,
      nullptr,
      "shardwise native kernel");
  ops.emplace(func.inc_ref().ptr(), std::move(own));
}

py::object take_question() {
  if (question == nullptr) return py::none();
  const int64_t number = ++number_of_questions;
  open_questions.emplace(number, std::move(question));
  return py::int_(number);
}

void answer(int64_t number, int kind, const py::tuple& specs, const std::vector<int64_t>& shape) {
  const auto found = open_questions.find(number);
  if (found == open_questions.end()) return;
  const auto asked = std::move(found->second);
  open_questions.erase(found);
  Recipe& recipe = *asked->recipe;
  recipe.kind = static_cast<Kind>(kind);
  recipe.shape = shape;
  for (py::handle spec : specs) recipe.specs.push_back(spec.inc_ref().ptr());
  if (asked->op->recipes.size() >= kMaxRecipes) forget(*asked->op);
  asked->op->recipes.emplace(asked->key, asked->recipe);
}

void withdraw(int64_t number) { open_questions.erase(number); }

void forget_all() {
  open_questions.clear();  // their answers may be out of date
  for (auto& [func, op] : ops) forget(*op);
}

void unregister_all() {
  forget_all();
  const auto gone = std::move(ops);
  ops.clear();
  for (const auto& [func, op] : gone) Py_DECREF(func);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("set_up", &set_up);
  module.def("register_op", &register_op);
  module.def("take_question", &take_question);
  module.def("answer", &answer);
  module.def("withdraw", &withdraw);
  module.def("forget_all", &forget_all);
  module.def("unregister_all", &unregister_all);
  module.def("number_of_calls", [] { return shared.calls; });
}
