// llama.cpp behind the driver's lines, which talk.py describes: `plain`, `ngram` and `draft model`.
//
// The steps are those of llama.cpp's own example of speculative decoding, for several sequences at once.

#include "common.h"
#include "sampling.h"
#include "speculative.h"

#include <nlohmann/json.hpp>

#include <chrono>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using nlohmann::json;

static void only_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) {
        std::cerr << text;
    }
}

static llama_model * open_model(const std::string & place) {
    auto params = llama_model_default_params();
    params.n_gpu_layers = 0;
    auto * model = llama_model_load_from_file(place.c_str(), params);
    if (model == nullptr) {
        throw std::runtime_error("cannot load " + place);
    }
    return model;
}

// One request: what of its text is in the cache, and what comes next.
struct sequence {
    llama_tokens past;
    llama_token  last;
    llama_tokens made;
    llama_tokens draft;
    std::vector<int> rows;
    common_sampler_ptr sampler;
};

// The contexts of target and draft model for as many sequences as run together.
struct engine {
    const json & options;
    llama_model * model;
    llama_context * target;
    llama_context * draft = nullptr;
    common_speculative_ptr speculative;
    int drafts = 0, draft_tokens = 0, accepted_tokens = 0;

    engine(const json & options, llama_model * model, llama_model * draft_model, int count)
        : options(options), model(model), target(open_context(model, count)) {
        const std::string mode = options["mode"];
        if (mode == "plain") {
            return;
        }
        common_params_speculative params;
        const int longest = options["draft_tokens"];
        params.draft.n_max = longest;
        params.draft.ctx_tgt = target;
        if (mode == "draft model") {
            draft = open_context(draft_model, count);
            params.draft.ctx_dft = draft;
            params.types = { COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE };
        } else {
            params.ngram_simple.size_n = options["ngram"].get<int>();
            params.ngram_simple.size_m = longest;
            params.types = { COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE };
        }
        speculative.reset(common_speculative_init(params, count));
        if (!speculative) {
            throw std::runtime_error("llama.cpp does not speculate in the mode " + mode);
        }
    }

    llama_context * open_context(llama_model * model, int count) {
        const int length = options["context"];
        auto params = llama_context_default_params();
        params.n_ctx = length * count;
        params.n_batch = length * count;
        params.n_seq_max = count;
        params.n_threads = params.n_threads_batch = options["threads"];
        params.no_perf = true;
        auto * context = llama_init_from_model(model, params);
        if (context == nullptr) {
            throw std::runtime_error("cannot make a context");
        }
        return context;
    }

    // Run the target on a batch, and let the draft model follow.
    void process(common_batch & batch) {
        if (llama_process(target, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) {
            throw std::runtime_error("llama_process failed");
        }
        if (speculative && !common_speculative_process(speculative.get(), batch)) {
            throw std::runtime_error("common_speculative_process failed");
        }
    }

    void forget(llama_seq_id i, llama_pos from) {
        llama_memory_seq_rm(llama_get_memory(target), i, from, -1);
        if (draft != nullptr) {
            llama_memory_seq_rm(llama_get_memory(draft), i, from, -1);
        }
    }

    json decode(const json & asked) {
        const int wanted = asked["new_tokens"];
        std::vector<sequence> all(asked["prompts"].size());
        common_batch batch(target);
        for (size_t i = 0; i < all.size(); ++i) {
            auto & each = all[i];
            each.past = asked["prompts"][i].get<llama_tokens>();
            each.last = each.past.back();
            each.past.pop_back();
            each.sampler = sampler(asked["temperature"], 1000 * asked["seed"].get<int>() + (int) i);
            forget(i, 0);
            for (size_t at = 0; at < each.past.size(); ++at) {
                batch.add(each.past[at], at, i, false);
            }
        }
        if (batch.size() > 0) {
            process(batch);
        }
        for (size_t i = 0; speculative && i < all.size(); ++i) {
            common_speculative_begin(speculative.get(), i, all[i].past);
        }
        while (step(all, batch, wanted)) {
        }
        json tokens = json::array();
        for (auto & each : all) {
            tokens.push_back(each.made);
        }
        return tokens;
    }

    // Draft, run the target once over all sequences that lack tokens, and keep what its samples confirm.
    bool step(std::vector<sequence> & all, common_batch & batch, int wanted) {
        propose(all, wanted);
        batch.clear();
        for (size_t i = 0; i < all.size(); ++i) {
            auto & each = all[i];
            each.rows.clear();
            if ((int) each.made.size() == wanted) {
                continue;
            }
            const llama_pos from = each.past.size();
            each.rows.push_back(batch.add(each.last, from, i, true));
            for (size_t k = 0; k < each.draft.size(); ++k) {
                each.rows.push_back(batch.add(each.draft[k], from + 1 + k, i, true));
            }
        }
        if (batch.size() == 0) {
            return false;
        }
        process(batch);
        for (size_t i = 0; i < all.size(); ++i) {
            auto & each = all[i];
            if (each.rows.empty()) {
                continue;
            }
            const auto ids = common_sampler_sample_and_accept_n(each.sampler.get(), target, each.rows, each.draft);
            if (speculative) {
                common_speculative_accept(speculative.get(), i, ids.size() - 1);
                drafts += !each.draft.empty();
                draft_tokens += each.draft.size();
                accepted_tokens += ids.size() - 1;
            }
            for (const auto id : ids) {
                each.past.push_back(each.last);
                each.last = id;
                each.made.push_back(id);
            }
            forget(i, each.past.size());
        }
        return true;
    }

    void propose(std::vector<sequence> & all, int wanted) {
        bool any = false;
        for (size_t i = 0; speculative && i < all.size(); ++i) {
            auto & each = all[i];
            each.draft.clear();
            const int room = wanted - (int) each.made.size() - 1;
            auto & params = common_speculative_get_draft_params(speculative.get(), i);
            params.drafting = room > 0;
            if (room > 0) {
                params = { true, room, (llama_pos) each.past.size(), each.last, &each.past, &each.draft };
                any = true;
            }
        }
        if (!any) {
            return;
        }
        common_speculative_draft(speculative.get());
        for (size_t i = 0; i < all.size(); ++i) {
            auto & each = all[i];
            const int room = std::max(0, wanted - (int) each.made.size() - 1);
            if ((int) each.draft.size() > room) {
                each.draft.resize(room);
            }
            // The draft model reads its own draft again, with the target's batch.
            if (draft != nullptr) {
                llama_memory_seq_rm(llama_get_memory(draft), i, each.past.size(), -1);
            }
        }
    }

    common_sampler_ptr sampler(float temperature, int seed) {
        common_params_sampling params;
        params.temp = temperature;
        params.seed = seed;
        params.no_perf = true;
        params.samplers = { COMMON_SAMPLER_TYPE_TEMPERATURE };
        return common_sampler_ptr(common_sampler_init(model, params));
    }
};

int main(int count, char ** arguments) {
    if (count != 2) {
        std::cerr << "usage: llama_driver OPTIONS, an object of JSON\n";
        return 2;
    }
    try {
        llama_log_set(only_errors, nullptr);
        llama_backend_init();
        const json options = json::parse(arguments[1]);
        auto * target = open_model(options["target"]);
        auto * draft = options["mode"] == "draft model" ? open_model(options["draft"]) : nullptr;
        std::map<size_t, std::unique_ptr<engine>> engines;
        std::cout << json{ { "ready", true } } << std::endl;
        for (std::string line; std::getline(std::cin, line);) {
            const json asked = json::parse(line);
            auto & own = engines[asked["prompts"].size()];
            if (!own) {
                own = std::make_unique<engine>(options, target, draft, (int) asked["prompts"].size());
            }
            const auto began = std::chrono::steady_clock::now();
            const json tokens = own->decode(asked);
            const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
            json answer{ { "tokens", tokens }, { "seconds", spent.count() } };
            if (own->speculative) {
                answer["counts"] = { { "drafts", own->drafts }, { "draft_tokens", own->draft_tokens },
                                     { "accepted_tokens", own->accepted_tokens } };
            }
            std::cout << answer << std::endl;
        }
    } catch (const std::exception & error) {
        std::cerr << error.what() << std::endl;
        return 1;
    }
    return 0;
}
