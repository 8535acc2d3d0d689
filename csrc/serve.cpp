// Runs calls of the core that arrive on standard input, so that the tests in Python can test a core for another
// processor in an emulator (tests/emulated_core.py).
//
// A request is a line of words, a name and its arguments, then the bytes of its arrays in order. An argument is text, or
// an array: <N passes N bytes, >N returns N bytes, =N does both. `field=` may precede an argument. The answer is a line,
// "ok" and results or "error" and a message, then the bytes of the returned arrays.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/levels.hpp"
#include "engine/engine.hpp"
#include "sequence/run.hpp"

namespace {

using egru::engine::Engine;

struct Array {
    std::unique_ptr<char[]> data;
    std::size_t size;
    bool returned;
};

class Request {
public:
    explicit Request(const std::string& line) {
        std::istringstream words(line);
        words >> name;
        for (std::string word; words >> word;) {
            const std::size_t equals = word.find('=', 1);
            if (equals != std::string::npos) fields_.push_back(word.substr(0, equals));
            arguments_.push_back(read(equals == std::string::npos ? word : word.substr(equals + 1)));
        }
    }
    std::string name;

    void rewind() { next_ = 0; }
    std::string text() { return arguments_.at(next_++); }
    std::int64_t integer() { return std::stoll(text()); }
    int number() { return static_cast<int>(integer()); }
    double real() { return std::stod(text()); }
    template <class T>
    T* array() {
        return reinterpret_cast<T*>(integer());
    }
    // Call set(field, value) for all arguments.
    template <class Set>
    void for_each(Set set) {
        for (std::size_t i = 0; i < arguments_.size(); ++i) set(fields_.at(i), arguments_[i]);
    }
    void write_arrays() const {
        for (const Array& array : arrays_)
            if (array.returned) std::fwrite(array.data.get(), 1, array.size, stdout);
    }

private:
    // Return an argument, or the address of an array.
    std::string read(const std::string& word) {
        if (std::strchr("<>=", word[0]) == nullptr) return word;
        const std::size_t size = std::stoull(word.substr(1));
        arrays_.push_back({std::unique_ptr<char[]>(new char[size]), size, word[0] != '<'});
        char* data = arrays_.back().data.get();
        std::memset(data, 0xff, size);  // NaN where nothing is written
        if (word[0] != '>' && std::fread(data, 1, size, stdin) != size) std::exit(EXIT_FAILURE);
        return std::to_string(reinterpret_cast<std::uintptr_t>(data));
    }

    std::vector<std::string> fields_, arguments_;
    std::deque<Array> arrays_;
    std::size_t next_ = 0;
};

egru::TrainCall train_call(Request& request) {
    egru::TrainCall call;
    request.for_each([&call](const std::string& field, const std::string& value) {
        if (field == "events") return void(call.events = egru::parse_events(value.c_str()));
        if (field == "reset") return void(call.reset = egru::parse_reset(value.c_str()));
        const auto set = [&](auto& member) {
            using T = std::remove_reference_t<decltype(member)>;
            if constexpr (std::is_same_v<T, double>)
                member = std::stod(value);
            else
                member = static_cast<T>(std::stoll(value));
        };
#define FIELD(name) if (field == #name) return set(call.name);
        FIELD(T) FIELD(B) FIELD(I) FIELD(H) FIELD(chunk) FIELD(threads) FIELD(one_thread) FIELD(float64) FIELD(direct)
        FIELD(direct_input) FIELD(direct_gates) FIELD(lstm) FIELD(compare_output) FIELD(after) FIELD(bounded)
        FIELD(width) FIELD(height) FIELD(rho) FIELD(cells) FIELD(input) FIELD(c0) FIELD(y0) FIELD(weight_ih)
        FIELD(weight_hh) FIELD(bias_ih) FIELD(bias_hh) FIELD(theta) FIELD(rho_units) FIELD(keep) FIELD(lengths)
        FIELD(input_t) FIELD(input_b) FIELD(c0_b) FIELD(y0_b) FIELD(keep_t) FIELD(keep_b) FIELD(keep_h) FIELD(y)
        FIELD(c) FIELD(c_last) FIELD(y_last) FIELD(gates) FIELD(grad_y) FIELD(grad_c) FIELD(grad_y_t) FIELD(grad_y_b)
        FIELD(grad_c_t) FIELD(grad_c_b) FIELD(grad_c_last) FIELD(grad_y_last) FIELD(grad_c0) FIELD(grad_y0)
        FIELD(grad_input) FIELD(grad_weight_ih) FIELD(grad_weight_hh) FIELD(grad_bias_ih) FIELD(grad_bias_hh)
        FIELD(grad_theta) FIELD(zero_blocks)
#undef FIELD
        throw std::invalid_argument("TrainCall has no field " + field);
    });
    return call;
}

std::unique_ptr<Engine> make_engine(Request& request) {
    egru::engine::EngineOptions options;
    options.weights = egru::engine::parse_weight_format(request.text().c_str());
    options.threads = request.number();
    options.streams = request.number();
    options.trace = request.real();
    options.has_trace = options.trace >= 0;
    options.mean = request.number() != 0;
    options.refresh = request.number();
    options.token_table_bytes = static_cast<std::size_t>(request.integer());
    options.packing = egru::engine::parse_packing(request.text().c_str());
    std::vector<egru::engine::LayerSource> layers(static_cast<std::size_t>(request.number()));
    for (auto& layer : layers) {
        layer.inputs = request.number(), layer.hidden = request.number();
        for (const float** values : {&layer.weight_ih, &layer.weight_hh, &layer.bias_ih, &layer.bias_hh, &layer.theta,
                                     &layer.rho})
            *values = request.array<const float>();
        layer.events = egru::parse_events(request.text().c_str());
        layer.reset = egru::parse_reset(request.text().c_str());
        layer.after = request.number() != 0;
        layer.keep = static_cast<float>(request.real());
        layer.lstm = request.number() != 0, layer.compare_output = request.number() != 0;
    }
    return std::make_unique<Engine>(layers, options);
}

class Server {
public:
    std::string run(Request& request) {
        if (request.name == "repeat") {  // how often to run each of the following requests, to measure it
            repeats_ = request.number();
            return "";
        }
        std::string result;
        for (int i = 0; i < repeats_; ++i, request.rewind()) result = run_once(request);
        return result;
    }

private:
    std::string run_once(Request& r) {
        std::ostringstream out;
        if (r.name == "levels") {
            for (int i = 0; i < egru::level_count; ++i) {
                const auto level = static_cast<egru::Level>(i);
                if (egru::level_available(level)) out << egru::level_name(level) << ' ';
            }
        } else if (r.name == "level") {
            out << egru::level_name(egru::current_level());
        } else if (r.name == "force_level") {
            egru::force_level(r.text());
        } else if (r.name == "train_forward") {
            egru::TrainCall call = train_call(r);
            out << egru::run_forward(call, [] {});
        } else if (r.name == "train_backward") {
            egru::TrainCall call = train_call(r);
            egru::run_backward(call, [] {});
        } else if (r.name == "engine") {
            engines_[++last_engine_] = make_engine(r);
            out << last_engine_;
        } else if (r.name == "delete") {
            engines_.erase(r.number());
        } else {
            run_engine(r, *engines_.at(r.number()), out);
        }
        return out.str();
    }

    static void run_engine(Request& r, Engine& engine, std::ostringstream& out) {
        if (r.name == "set_embedding") {
            const float* table = r.array<const float>();
            const int tokens = r.number(), width = r.number();
            engine.set_embedding(table, tokens, width);
        } else if (r.name == "set_readout") {
            const float *weight = r.array<const float>(), *bias = r.array<const float>();
            const int inputs = r.number(), outputs = r.number();
            engine.set_readout({inputs, outputs, weight, bias});
        } else if (r.name == "run") {
            const float* x = r.array<const float>();
            const auto* ids = r.array<const std::int64_t>();
            const int steps = r.number();
            const bool last = r.number() != 0;
            float* result = r.array<float>();
            const auto* mask = r.array<const std::uint8_t>();
            bool finite = true;
            for (int from = 0; from < steps; from += engine.chunk_steps()) {
                const int count = std::min(engine.chunk_steps(), steps - from), offset = from * engine.streams();
                finite &= engine.run(x ? x + offset * engine.inputs() : nullptr, ids ? ids + offset : nullptr, count,
                                     last, last ? result : result + offset * engine.outputs(), mask);
            }
            out << finite;
        } else if (r.name == "step_sparse") {
            const auto* index = r.array<const std::int32_t>();
            const float* value = r.array<const float>();
            const int count = r.number();
            out << engine.step_sparse(index, value, count, r.array<float>());
        } else if (r.name == "skip") {
            const int stream = r.number();
            const std::int64_t steps = r.integer();
            float* result = r.array<float>();
            auto* row_steps = r.array<std::int64_t>();
            float* rows = r.array<float>();
            egru::engine::Gap gap{row_steps, rows, r.number()};
            engine.skip(stream, steps, result, gap);
            out << gap.finite << ' ' << gap.steps << ' ' << gap.count;
        } else if (r.name == "time") {
            out << engine.time();
        } else if (r.name == "set_time") {
            engine.set_time(r.integer());
        } else if (r.name == "reset") {
            engine.reset(r.array<const std::uint8_t>());
        } else if (r.name == "sparse_matrices") {
            for (const bool value : engine.sparse_matrices()) out << value << ' ';
        } else if (r.name == "reset_counters") {
            engine.reset_counters();
        } else if (r.name == "counters") {
            out << engine.counters().steps << ' ' << engine.counters().macs;
            for (const std::int64_t events : engine.counters().events) out << ' ' << events;
        } else if (r.name == "get_state" || r.name == "set_state") {
            const int layer = r.number();
            float *c = r.array<float>(), *y = r.array<float>();
            if (r.name == "get_state")
                engine.get_state(layer, c, y);
            else
                engine.set_state(layer, c, y);
        } else if (r.name == "get_trace" || r.name == "set_trace") {
            double* trace = r.array<double>();
            auto* steps = r.array<std::int64_t>();
            if (r.name == "get_trace")
                engine.get_trace(trace, steps);
            else
                engine.set_trace(trace, steps);
        } else if (r.name == "always_divide") {
            engine.team_size().always_divide(r.number() != 0);
        } else if (r.name == "team_size") {
            out << engine.team_size().last();
        } else if (r.name == "engine_level") {
            out << engine.level();
        } else if (r.name == "weight_bytes") {
            out << engine.weight_bytes();
        } else {
            throw std::invalid_argument("unknown request " + r.name);
        }
    }

    std::map<int, std::unique_ptr<Engine>> engines_;
    int last_engine_ = 0, repeats_ = 1;
};

}  // namespace

int main() {
    Server server;
    std::string line;
    for (int c; (c = std::getchar()) != EOF;) {
        if (c != '\n') {
            line += static_cast<char>(c);
            continue;
        }
        Request request(line);
        line.clear();
        try {
            const std::string result = server.run(request);
            std::printf("ok %s\n", result.c_str());
            request.write_arrays();
        } catch (const std::exception& error) {
            std::printf("error %s\n", error.what());
        }
        std::fflush(stdout);
    }
}
