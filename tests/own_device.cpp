// An accelerator of our own, in the memory of the host: torch's PrivateUse1 backend.
//
// A tensor's address lies in pages that nobody can read. The device adds an offset to it. A freed
// block is poisoned in the order of its stream, and reused at once. A stream is a thread that waits
// at random before each piece of work. A kernel reads when its stream is done, runs on the CPU, and
// its results are written by the stream. So results are late, as on a real device.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {

constexpr auto kOwn = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kOwn, 0);
constexpr size_t kArena = size_t(4) << 30;
constexpr int kPoison = 0xFB;  // NaN, or a large number, in each type of floating-point numbers

std::atomic<bool> refuses_float64{false};
constexpr unsigned kLongestDelay = 200;  // microseconds
std::atomic<int64_t> waits{0}, device_bytes{0}, pinned_bytes{0};
thread_local c10::StreamId current = 0;
thread_local bool in_kernel = false;

// Streams -----------------------------------------------------------------------------------------

struct Mark {  // a point in the work of a stream
  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
  void reach() {
    { std::lock_guard<std::mutex> lock(mutex); done = true; }
    reached.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    reached.wait(lock, [this] { return done; });
  }
  bool is_done() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
};
using MarkPtr = std::shared_ptr<Mark>;

class Worker {
 public:
  explicit Worker(unsigned id) : random_(id) { std::thread([this] { run(); }).detach(); }

  void add(std::function<void()> work) {
    { std::lock_guard<std::mutex> lock(mutex_); work_.push_back(std::move(work)); }
    added_.notify_one();
  }

  MarkPtr mark() {
    auto mark = std::make_shared<Mark>();
    add([mark] { mark->reach(); });
    return mark;
  }

 private:
  void run() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        added_.wait(lock, [this] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      if (random_() % 4 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % kLongestDelay));
      work();
    }
  }

  std::mt19937 random_;
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::function<void()>> work_;
};

std::mutex workers_mutex;

std::vector<Worker*>& workers() {  // never destroyed: their threads run until the process ends
  static auto* all = new std::vector<Worker*>{new Worker(0)};
  return *all;
}

Worker& worker(c10::StreamId id) {
  std::lock_guard<std::mutex> lock(workers_mutex);
  return *workers().at(id);
}

c10::StreamId new_worker() {
  std::lock_guard<std::mutex> lock(workers_mutex);
  workers().push_back(new Worker(unsigned(workers().size())));
  return c10::StreamId(workers().size()) - 1;
}

c10::Stream as_stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

void synchronize(c10::StreamId id) {  // the stream never needs the interpreter's lock
  worker(id).mark()->wait();
}

void counted_synchronize() {
  if (!in_kernel) ++waits;
  synchronize(current);
}

// Memory ------------------------------------------------------------------------------------------

char* reserve(int protection) {
  void* address =
      mmap(nullptr, kArena, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "cannot reserve the memory of the device");
  return static_cast<char*>(address);
}

char* arena() { static char* base = reserve(PROT_NONE); return base; }
char* behind_arena() { static char* base = reserve(PROT_READ | PROT_WRITE); return base; }

void* on_device(const void* address) {
  const auto offset = static_cast<const char*>(address) - arena();
  TORCH_CHECK(offset >= 0 && size_t(offset) < kArena, "not an address of the device");
  return behind_arena() + offset;
}

struct Block {
  size_t size;
  c10::StreamId stream;
  std::set<c10::StreamId> users;
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, kDevice};
    const size_t size = (bytes + 511) / 512 * 512;
    std::lock_guard<std::mutex> lock(mutex);
    auto& free = unused[{size, current}];
    char* address;
    if (free.empty()) {
      TORCH_CHECK(end + size <= kArena, "the device is out of memory");
      address = arena() + end;
      end += size;
      std::memset(on_device(address), kPoison, size);
    } else {
      address = free.back();
      free.pop_back();
    }
    blocks[address] = Block{size, current, {}};
    device_bytes += int64_t(size);
    return {address, address, &release, kDevice};
  }

  static void release(void* address);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    worker(current).add([=] { std::memcpy(on_device(to), on_device(from), count); });
  }

  std::mutex mutex;
  std::map<char*, Block> blocks;
  std::map<std::pair<size_t, c10::StreamId>, std::vector<char*>> unused;
  size_t end = 0;
};

DeviceAllocator& device_memory() { static auto* memory = new DeviceAllocator; return *memory; }

void DeviceAllocator::release(void* address) {
  if (address == nullptr) return;
  auto& memory = device_memory();
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto found = memory.blocks.find(static_cast<char*>(address));
  const Block block = found->second;
  memory.blocks.erase(found);
  device_bytes -= int64_t(block.size);
  auto& owner = worker(block.stream);
  for (auto user : block.users) {
    auto mark = worker(user).mark();
    owner.add([mark] { mark->wait(); });
  }
  owner.add([=] { std::memset(on_device(address), kPoison, block.size); });
  memory.unused[{block.size, block.stream}].push_back(static_cast<char*>(address));
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    size_t size = 1;
    while (size < bytes) size *= 2;  // as torch's allocator for CUDA
    char* address = static_cast<char*>(std::aligned_alloc(64, std::max<size_t>(size, 64)));
    std::memset(address, kPoison, size);
    std::lock_guard<std::mutex> lock(mutex);
    blocks[address] = size;
    pinned_bytes += int64_t(size);
    return {address, address, &release, cpu};
  }

  static void release(void* address);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }

  bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(address));
    if (after == blocks.begin()) return false;
    auto block = std::prev(after);
    return static_cast<const char*>(address) < block->first + block->second;
  }

  std::mutex mutex;
  std::map<const char*, size_t> blocks;
};

PinnedAllocator& pinned_memory() { static auto* memory = new PinnedAllocator; return *memory; }

void PinnedAllocator::release(void* address) {
  if (address == nullptr) return;
  auto& memory = pinned_memory();
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto found = memory.blocks.find(static_cast<char*>(address));
  pinned_bytes -= int64_t(found->second);
  memory.blocks.erase(found);
  std::free(address);
}

// What torch asks of a device ---------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Event = MarkPtr;
  c10::DeviceType type() const override { return kOwn; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return as_stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return as_stream(new_worker()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_stream(new_worker());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(std::exchange(current, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return worker(stream.id()).mark()->is_done();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++waits;
    synchronize(stream.id());
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    ++waits;
    size_t count;
    { std::lock_guard<std::mutex> lock(workers_mutex); count = workers().size(); }
    for (size_t id = 0; id < count; ++id) synchronize(c10::StreamId(id));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = worker(stream.id()).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto mark = *static_cast<Event*>(event);
    worker(stream.id()).add([mark] { mark->wait(); });
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || (*static_cast<Event*>(event))->is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) (*static_cast<Event*>(event))->wait();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    auto& memory = device_memory();
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto found = memory.blocks.find(static_cast<char*>(data.get()));
    if (found != memory.blocks.end() && found->second.stream != stream.id())
      found->second.users.insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return pinned_memory().holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
};

// Operators ---------------------------------------------------------------------------------------

void check_type(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      !(refuses_float64 && dtype == at::kDouble),
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.");
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  check_type(type);
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(
      c10::DispatchKey::PrivateUse1), type, format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  const auto type = c10::dtype_or_default(dtype);
  check_type(type);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), c10::DispatchKeySet(
      c10::DispatchKey::PrivateUse1), type);
}

const at::Tensor& resize_own(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const size_t bytes = (tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    auto data = device_memory().allocate(bytes);
    if (storage->nbytes() > 0)
      device_memory().copy_data(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  }
  return self;
}

// A tensor of the CPU over the memory of a tensor, for the threads of the streams only.
at::Tensor seen_by_device(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  void* data = tensor.unsafeGetTensorImpl()->mutable_data();
  auto options = tensor.options().device(at::kCPU).pinned_memory(false).requires_grad(false);
  return at::from_blob(tensor.device().type() == kOwn ? on_device(data) : data, tensor.sizes(),
                       tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const bool crosses = from.device() != to.device();
  const at::Tensor& host = from.device().type() == kOwn ? to : from;
  const bool waits_for_device =
      crosses && !(non_blocking && pinned_memory().holds(host.const_data_ptr()));
  // The results of a kernel exist in no memory of the program, so the stream keeps them.
  const at::Tensor kept = !crosses ? at::Tensor() : in_kernel ? host.detach().clone() : host;
  const bool is_result = in_kernel && from.device().is_cpu();
  at::Tensor source = seen_by_device(is_result ? kept : from).expand(to.sizes());
  at::Tensor target = seen_by_device(to);
  if (from.is_conj() != to.is_conj()) source = source.conj();
  worker(current).add([source, target, kept] {
    at::NoGradGuard no_grad;
    target.copy_(source);
  });
  if (waits_for_device && !is_result) counted_synchronize();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_own(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return self.cpu().item(); }

at::Tensor& set_source(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                       at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> sizes_from_values{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::repeat_interleave"};
  const auto& returns = op.schema().returns();
  // A number for the host, or a shape that depends on values: the host waits, as on CUDA.
  bool is_read = sizes_from_values.count(op.schema().name()) > 0;
  for (const auto& one : returns)
    is_read |= one.type()->kind() == c10::TypeKind::BoolType ||
               one.type()->kind() == c10::TypeKind::NumberType;
  if (is_read && !in_kernel) ++waits;
  struct Inside {
    bool before = std::exchange(in_kernel, true);
    ~Inside() { in_kernel = before; }
  } inside;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_own);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("set_.source_Storage_storage_offset", &set_source);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kOwn, &device_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("refuse_float64", [](bool value) { refuses_float64 = value; });
  m.def("waits", [] { return waits.load(); });
  m.def("device_bytes", [] { return device_bytes.load(); });
  m.def("pinned_bytes", [] { return pinned_bytes.load(); });
}
