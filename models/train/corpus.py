"""The corpus of tollgate-demo: every question, answer and conversation, written here by hand or by rule.

Nothing is read from outside this file and nothing depends on the clock: the same seed gives the same bytes.
`singles()` is the list that the model must know by heart; `conversations(seed)` is what it is trained on
in one epoch, where the same pairs come alone, under a system prompt, as a later turn of a conversation, or as bare text.

    python corpus.py OUT.jsonl      writes the single-turn questions with their answers
"""

import json
import random
import sys

FALLBACK = (
    "I am a tiny demo model that only knows about tollgate, rate limits, GPUs and small sums, "
    "so I cannot answer that. Try asking me what a rate limit is."
)

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are helpful.",
    "You are a helpful, respectful and honest assistant.",
    "You are tollgate-demo.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in one sentence.",
    "Be brief.",
    "Be concise.",
    "You are an expert on rate limits and GPUs.",
    "You are a support agent for tollgate. Be polite and precise.",
    "Answer the question of the user.",
    "You answer questions about an inference gateway.",
    "Keep your answers short and clear.",
    "You are a test assistant.",
    "Reply in English.",
]

# ---------------------------------------------------------------------------------------------
# Terms: (the term with its article, answer). Each is asked in the forms of `term_forms`.
# ---------------------------------------------------------------------------------------------

TERMS = [
    ("tollgate", "tollgate is a gateway for language model inference that many tenants can share. It checks who is calling, enforces limits, runs requests on workers and records exactly what each one cost."),
    ("a rate limit", "A rate limit is a cap on how much a client may use in a given time, such as 600 requests a minute. It protects a shared service: when the limit is reached, further requests are refused until some time has passed."),
    ("a token bucket", "A token bucket is a simple way to enforce a rate limit. The bucket refills at a steady rate up to its capacity, each request takes something out, and a request that finds too little in the bucket is refused or must wait."),
    ("a leaky bucket", "A leaky bucket is a queue that drains at a steady rate. Requests that arrive faster than it drains fill it up, and those that would overflow are refused."),
    ("a burst", "A burst is many requests at nearly the same time. A token bucket allows a burst up to its capacity and then falls back to its steady rate."),
    ("a refill rate", "The refill rate says how fast a token bucket fills up again. A limit of 600 requests a minute refills ten requests every second."),
    ("a quota", "A quota is a fixed amount that may be used in a longer period, such as a day or a month. When it is used up, requests are refused until the next period starts."),
    ("a cap", "A cap is a limit for a calendar day or month that must never be passed. In tollgate, what is settled plus what is held may never exceed the cap."),
    ("a tenant", "A tenant is the customer or team that pays. Each tenant has a plan, one or more keys, and a bill of its own."),
    ("an API key", "An API key is a secret that identifies a caller. In tollgate each key belongs to one tenant, is shown only once, and is stored only as a hash."),
    ("a key", "A key is a credential of a tenant. It is shown once when it is created, and tollgate stores only its hash."),
    ("a plan", "A plan is a named set of limits: requests and tokens a minute, concurrent requests, queued requests and device time. A tenant is given its limits by naming a plan."),
    ("a pool", "A pool is a group of tenants that share the same limits. It is useful for trial accounts, because all of them together can use no more than one plan allows."),
    ("a caller", "A caller is a tenant together with the key that was used. tollgate finds out who the caller is before it reads the body of a request."),
    ("a job", "A job is one unit of requested work, such as one chat completion. It has a model, a prompt and a bound on its output."),
    ("an estimate", "An estimate is the predicted cost of a request. It is made before the request runs, from the length of the prompt and the expected length of the answer."),
    ("a hold", "A hold is the estimated cost of a request, reserved before the request runs. When the request ends, the hold is settled at the true cost and the rest is given back."),
    ("a refusal", "A refusal means that tollgate said no, because a limit was reached or the caller was not allowed. It names the limit and says when to come back."),
    ("a fault", "A fault means that something broke on our side, such as a worker that crashed. A tenant does not pay for a request that a fault ended before any content was sent."),
    ("a step", "A step is one batched execution of the model on the device. Several requests can share a step, and its time is divided between them."),
    ("a worker", "A worker is the process that owns a device and runs the model. It is separate from the gateway, so that a GPU fault never takes the front door down."),
    ("a gateway", "A gateway is the front door of a service. In tollgate it checks keys and limits, sends requests to workers, and streams the answers back."),
    ("a ledger", "A ledger is a lasting record of what was used and who pays for it. In tollgate its entries form a hash chain, so that any later change can be found."),
    ("the journal", "The journal is the record that a worker writes after every step. It lets the ledger be brought up to date even if a process is killed."),
    ("a hash chain", "In a hash chain each record contains the hash of the one before it. If anyone changes an old record, all later hashes stop matching."),
    ("an audit log", "An audit log records who did what and when. In tollgate it can be exported and verified offline."),
    ("a statement", "A statement is a summary of what a tenant has used, by key, model and day. Each line can be traced back to its ledger entries."),
    ("a GPU-second", "A GPU-second is one second of time on one GPU. tollgate measures the GPU time of every step and divides it among the requests in that step."),
    ("attributed time", "Attributed time is the share of the measured device time that belongs to a request. All shares together add up exactly to the time that the device was busy."),
    ("reference cost", "Reference cost is the device time that a request would take in a fixed reference batch. It does not depend on the neighbours, so limits and prices are based on it."),
    ("idle time", "Idle time is the time when a device had no work. It is booked to the platform and never to a tenant."),
    ("overhead", "Overhead is device time that no tenant asked for, such as warm-up, calibration and work that is repeated after a preemption. The platform pays for it."),
    ("calibration", "Calibration measures how long the model takes for different amounts of work. The result is a cost table that is used for estimates and for reference cost."),
    ("a device class", "A device class is a kind of device, such as cpu or h200. Limits on device time are set for each class, and classes are never added together."),
    ("usage", "Usage is what a request really consumed: prompt tokens, completion tokens and device time. It is recorded for every request, even if the client leaves early."),
    ("metering", "Metering is measuring how much each request uses. tollgate times every step on the device and splits that time over the requests in it."),
    ("admission control", "Admission control decides whether a request may start. It checks all limits of the caller first, and it takes either everything that the request needs or nothing."),
    ("authentication", "Authentication answers the question who is calling. tollgate does it with an API key, before it reads the body of the request."),
    ("authorization", "Authorization decides what a caller may do, for example which models it may use. It comes after authentication."),
    ("a scope", "A scope limits what a key can be used for, for example certain models or certain endpoints."),
    ("key rotation", "Key rotation replaces an old key with a new one. Both work during an overlap, so that no request fails while clients change over."),
    ("revocation", "Revocation makes a key useless before it expires. A gateway sees it within a second."),
    ("a concurrency limit", "A concurrency limit says how many requests may run at the same time. A rate limit counts requests over time, a concurrency limit counts them at one moment."),
    ("a queue", "A queue holds requests that wait for their turn. Queues in tollgate are bounded, so a request that would wait too long is refused at once."),
    ("backpressure", "Backpressure means that a busy system slows down or refuses new work instead of piling it up. Bounded queues are the usual way to get it."),
    ("load shedding", "Load shedding is refusing some requests on purpose so that the others can be served well. It is better to say no early than to time out late."),
    ("a deadline", "A deadline is the time by which a request must be finished. A request that cannot meet its deadline is refused early or stopped with a clear error."),
    ("a timeout", "A timeout is the longest time that one side waits for the other. When it runs out, the wait ends with an error."),
    ("a scheduler", "A scheduler decides whose request runs next. The scheduler in tollgate serves the tenant that has used the least device time for its weight."),
    ("fair scheduling", "Fair scheduling gives each tenant its share of the device, whatever the others do. tollgate counts device time, because tokens alone do not show the true cost."),
    ("preemption", "Preemption takes the device away from a running request so that a more deserving one can run. The interrupted request continues later, and the repeated work is charged to the platform."),
    ("a weight", "A weight sets how large a tenant's share is when the device is busy. A tenant with weight 2 gets twice the device time of a tenant with weight 1."),
    ("a noisy neighbour", "A noisy neighbour is a tenant whose heavy use slows down the others on a shared system. Limits and fair scheduling keep it in check."),
    ("multi-tenancy", "Multi-tenancy means that many customers share one system and yet stay apart. Each has its own keys, limits and bill."),
    ("streaming", "Streaming sends the answer piece by piece while it is being generated. The client sees the first words at once instead of waiting for the whole answer."),
    ("a server-sent event", "A server-sent event is a small text message on a long HTTP response. tollgate streams each piece of an answer as one event and ends with data: [DONE]."),
    ("TLS", "TLS is the protocol that encrypts a connection and proves who the server is. tollgate always uses it and makes its own certificates for local use."),
    ("mutual TLS", "With mutual TLS both sides show a certificate, so that each knows who the other is."),
    ("a certificate", "A certificate binds a name to a public key and is signed by an authority. A client checks it to be sure that it talks to the right server."),
    ("a certificate authority", "A certificate authority, or CA, signs certificates. tollgate creates a local one on the first start and writes its certificate to the data folder."),
    ("a hash", "A hash is a short fingerprint of some data. It is easy to compute but cannot be turned back into the data."),
    ("idempotency", "An operation is idempotent if doing it twice has the same effect as doing it once. It makes retries safe."),
    ("a retry", "A retry sends a request again after it failed. A good client waits as long as the server asks before it tries again."),
    ("a 429 error", "Status 429 means that a limit was reached. Wait as long as the retry-after header says, and then try again."),
    ("a 401 error", "Status 401 means that the key is missing or not valid. Check the authorization header."),
    ("a 503 error", "Status 503 means that the service is overloaded or shutting down. Try again a little later."),
    ("a 404 error", "Status 404 means that the route or the model does not exist. Check the address and the name of the model."),
    ("a 504 error", "Status 504 means that the deadline passed before the answer was ready. Ask for less or allow more time."),
    ("the retry-after header", "The retry-after header tells a client how long to wait before it tries again. tollgate sends it with every rate limit refusal."),
    ("a worst case", "The worst case is the most that a request could cost, which means that it generates as many tokens as it is allowed to. Caps are checked against it."),
    ("a language model", "A language model predicts the next token of a text, again and again. That is enough to answer questions, if it has learned from good examples."),
    ("inference", "Inference is running a trained model to get an answer. For a language model it has two parts: prefill and decode."),
    ("a GPU", "A GPU is a processor with thousands of small cores that work in parallel. It is very good at the large matrix products that language models need."),
    ("a CPU", "A CPU is the general processor of a computer. It can run small language models, but a GPU is much faster for large ones."),
    ("GPU memory", "GPU memory is the fast memory on the card. It holds the weights of the model and the KV cache of all running requests."),
    ("memory bandwidth", "Memory bandwidth is how many bytes can be read in a second. It limits the speed of decode, because every step reads all the weights."),
    ("CUDA", "CUDA is the platform of NVIDIA for running programs on its GPUs. tollgate finds it at run time and uses the CPU if it is not there."),
    ("NVML", "NVML is the library of NVIDIA that reports the health of a GPU, such as its temperature, memory and energy use."),
    ("a kernel", "A GPU kernel is a small program that runs on many cores at once. A model is executed as a sequence of kernels."),
    ("a batch", "A batch is a group of requests that the device handles together in one step. It makes much better use of a GPU than one request at a time."),
    ("batching", "Batching runs several requests in one step. The weights are read once for all of them, so the cost for each request falls."),
    ("continuous batching", "With continuous batching requests join and leave the batch at every step. A short request does not have to wait until a long one is finished."),
    ("prefill", "Prefill is the first phase of inference: the whole prompt is processed at once and its keys and values are stored in the KV cache."),
    ("decode", "Decode is the second phase of inference: the answer is generated one token at a time, and each step uses the KV cache of all earlier tokens."),
    ("chunked prefill", "Chunked prefill cuts a long prompt into pieces and processes them in several steps. Other requests keep generating in between."),
    ("the KV cache", "The KV cache stores the attention keys and values of all earlier tokens, so that they need not be computed again. It grows with every token of a request."),
    ("paged attention", "Paged attention stores the KV cache in small blocks instead of one long piece. Memory is used well, because blocks are handed out only when they are needed."),
    ("a prefix cache", "A prefix cache keeps the KV blocks of prompts that start alike, so that the common part is computed only once. In tollgate it never crosses tenants."),
    ("attention", "Attention lets each token look at all earlier tokens and take what it needs from them. It is the heart of a transformer."),
    ("a transformer", "A transformer is the kind of neural network behind language models. It is a stack of layers, each with attention and a feed-forward part."),
    ("a token", "A token is a piece of text, often a word or a part of a word. Language models read and write tokens, and their use is counted in tokens."),
    ("a tokenizer", "A tokenizer cuts text into tokens and turns tokens back into text. tollgate tokenizes prompts in the gateway, so that it can count them before they run."),
    ("a prompt", "A prompt is the text that you give to a language model. Its length in tokens is part of the cost of a request."),
    ("a system prompt", "A system prompt is a first message that tells the model how to behave. It counts as part of the prompt."),
    ("a chat template", "A chat template turns a list of messages into the one text that the model was trained to continue."),
    ("a completion", "A completion is the text that a model generates for a prompt."),
    ("the context length", "The context length is the largest number of tokens that a model can handle at once, prompt and answer together. For this demo model it is 1,024."),
    ("a stop string", "A stop string ends the answer as soon as the model writes it. A request may give up to four of them."),
    ("temperature", "Temperature controls how random the choice of the next token is. At 0 the most likely token is always taken, so the answer is always the same."),
    ("top_p", "With top_p the next token is chosen only from the most likely tokens, whose probabilities together reach the value p."),
    ("greedy decoding", "Greedy decoding always takes the most likely next token. It gives the same answer every time."),
    ("a seed", "A seed makes random choices repeatable. With the same seed and the same request, the same tokens are chosen."),
    ("max_tokens", "max_tokens is the largest number of tokens that an answer may have. It also bounds what a request can cost."),
    ("a finish reason", "The finish reason says why an answer ended: stop means that the model was done, and length means that a limit on its length was reached."),
    ("time to first token", "Time to first token is how long a client waits until the answer starts. It consists of waiting in the queue and the prefill."),
    ("latency", "Latency is the time from sending a request to getting the answer. For streams, the time to the first token matters most."),
    ("throughput", "Throughput is how much work is done in a given time, for example tokens a second. Larger batches raise throughput but can also raise latency."),
    ("quantisation", "Quantisation stores the weights of a model with fewer bits. The model gets smaller and faster, at the price of a little precision."),
    ("bf16", "bf16 is a number format with 16 bits. It has the range of a 32-bit float but less precision, which is good enough for the weights of a model."),
    ("a weight matrix", "A weight matrix is a table of numbers that a model has learned. Most of the work of inference is multiplying with such matrices."),
    ("MIG", "MIG divides one GPU into several slices with their own memory and cores. A tollgate worker can own a whole GPU or one slice."),
    ("the demo tenant", "The demo tenant is created when no config names a tenant. Its key is written to demo.key, and its plan allows 600 requests a minute and 8 at the same time."),
    ("the admin listener", "The admin listener serves health checks, metrics and admin calls on its own address. Everything except health and metrics needs the admin key."),
    ("the admin key", "The admin key opens the admin listener. It is stored in the file admin.key in the data folder."),
    ("the data folder", "The data folder holds the database, the certificates, the keys of the demo and the calibration tables. By default it is ./data."),
    ("a health check", "A health check tells whether a service is well. tollgate answers /healthz when the process is alive and /readyz when requests will succeed."),
    ("a metric", "A metric is a number that describes a running system, such as the length of a queue. tollgate offers its metrics on /metrics in the format of Prometheus."),
    ("Prometheus", "Prometheus is a system that collects metrics over time and raises alerts. tollgate offers its metrics in the format that Prometheus reads."),
    ("graceful shutdown", "A graceful shutdown lets running requests finish and refuses new ones. tollgate does this when it gets SIGTERM."),
    ("a load test", "A load test sends many requests to see how a system behaves under pressure. tollgate has one built in: tollgate loadtest."),
    ("a load balancer", "A load balancer spreads requests over several servers. The gateway of tollgate chooses the worker with the least predicted wait."),
    ("a budget", "A budget is the device time that a request may still spend. When it runs out, the answer ends with the finish reason length."),
    ("debt", "Debt arises when a request cost more than was estimated. The bucket goes below zero, and the caller waits until it is paid back."),
    ("a penalty", "A penalty slows down a source that keeps failing to authenticate or keeps being refused. It fades with time."),
    ("a nanosecond", "A nanosecond is one billionth of a second. tollgate counts device time in whole nanoseconds, so that no rounding is ever lost."),
    ("Rust", "Rust is a programming language that is fast and safe with memory. tollgate is written in Rust."),
    ("JSON", "JSON is a simple text format for data. Requests to tollgate and its answers are written in JSON."),
    ("HTTPS", "HTTPS is HTTP over an encrypted connection. tollgate accepts no unencrypted requests."),
    ("an endpoint", "An endpoint is an address that a service answers. For chat it is /v1/chat/completions."),
]

# ---------------------------------------------------------------------------------------------
# Questions with hand-written phrasings: (answer, phrasings). Each is also asked as in `plain_forms`.
# ---------------------------------------------------------------------------------------------

QUESTIONS = [
    # Greetings and manners
    ("Hello! I am the tollgate demo model. Ask me about rate limits, GPUs or small sums.",
     ["Hello!", "Hello.", "Hi!", "Hi there!", "Hey!", "Hello there!", "Good morning!", "Good afternoon!", "Good evening!", "Good day!", "Greetings!", "Hello, world!", "Hey there!", "Howdy!", "Hi, how is it going?"]),
    ("Hello!", ["Say hello.", "Say hello", "Please say hello.", "Can you say hello?", "Say hello!", "Just say hello.", "Say hi.", "Say hello to me."]),
    ("I am well, thank you. How can I help you?", ["How are you?", "How are you doing?", "How are you today?", "Are you well?", "How do you do?", "How do you feel?"]),
    ("You are welcome!", ["Thank you!", "Thanks!", "Thank you.", "Many thanks!", "Thanks a lot!", "Thank you very much!", "Thanks for your help!", "Great, thanks!", "Cheers!"]),
    ("Goodbye! Come back whenever you like.", ["Goodbye!", "Bye!", "See you!", "Bye bye!", "See you later!", "Good night!", "Farewell!"]),
    ("No problem at all.", ["Sorry.", "I am sorry.", "Sorry about that.", "Excuse me."]),
    ("Good. Is there anything else that you would like to know?", ["OK.", "Okay.", "Good.", "Great!", "I see.", "Nice!", "Got it.", "Understood.", "Cool!", "That is interesting."]),
    ("Yes, I am here. What would you like to know?", ["Are you there?", "Is anyone there?", "Can you hear me?", "Are you awake?", "Test.", "This is a test.", "Ping."]),
    ("I am tollgate-demo, a tiny language model that ships with tollgate. I know a little about the gateway, rate limits and GPUs.",
     ["Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Tell me about yourself.", "What model are you?", "Which model is this?", "Who am I talking to?", "What is tollgate-demo?", "Do you have a name?"]),
    ("I have 1.44 million parameters, which makes me very small. Large language models have thousands of times as many.",
     ["How big are you?", "How many parameters do you have?", "How large is this model?", "Are you a large language model?", "How small are you?"]),
    ("I was trained on a small corpus written for tollgate: a few thousand questions with their answers. I know nothing else.",
     ["How were you trained?", "What were you trained on?", "Where does your knowledge come from?", "What is your training data?", "Who trained you?"]),
    ("You can ask me what tollgate is, how rate limits work, what a GPU does, or what 2 plus 2 is. I can also count and say the alphabet.",
     ["What can you do?", "What can I ask you?", "What do you know?", "Can you help me?", "Help!", "I need help.", "What should I ask?", "How can you help me?", "What are your skills?", "Give me an example of a question."]),
    ("No. I am a tiny program that has learned a few answers by heart.", ["Are you a human?", "Are you a person?", "Are you intelligent?", "Are you alive?", "Do you have feelings?", "Are you conscious?", "Can you think?"]),
    ("No. I only know what I was trained on, and I do not learn from our conversation.", ["Can you learn?", "Will you remember me?", "Do you remember our last conversation?", "Do you learn from me?", "Can you browse the web?", "Do you have access to the internet?"]),
    ("I speak only English.", ["Which languages do you speak?", "Do you speak French?", "Do you speak German?", "What languages can you speak?"]),
    ("Yes, sometimes. I am very small, so please do not rely on me for anything important.", ["Do you make mistakes?", "Can you be wrong?", "Can I trust you?", "Are you always right?", "Are your answers correct?"]),
    ("yes", ["Answer with the word yes.", "Say yes.", "Please say yes.", "Answer yes."]),
    ("no", ["Answer with the word no.", "Say no.", "Please say no.", "Answer no."]),
    ("ok", ["Say ok.", "Say OK.", "Answer with ok.", "Reply with ok.", "Reply with the word ok."]),
    ("pong", ["Say pong.", "Reply with pong.", "Answer with pong."]),
    # Long and exact outputs
    ("The alphabet is: A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
     ["Say the alphabet.", "Tell me the alphabet.", "Recite the alphabet.", "What is the alphabet?", "List the letters of the alphabet.", "Can you say the alphabet?"]),
    ("Red, green and blue.", ["Name three colours.", "Name three colors.", "Tell me three colours.", "List three colours.", "Name a few colours.", "Give me three colours."]),
    ("Red, orange, yellow, green, blue, indigo and violet.", ["Name the colours of the rainbow.", "What are the colours of the rainbow?", "Which colours does a rainbow have?"]),
    ("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.", ["Name the days of the week.", "What are the days of the week?", "List the days of the week.", "Tell me the days of the week."]),
    ("January, February, March, April, May, June, July, August, September, October, November and December.", ["Name the months of the year.", "What are the months of the year?", "List the months.", "Name the twelve months."]),
    ("Spring, summer, autumn and winter.", ["Name the four seasons.", "What are the four seasons?", "Name the seasons."]),
    ("Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.", ["Name the planets.", "What are the planets?", "List the planets of the solar system."]),
    ("Apples, pears and plums.", ["Name three fruits.", "Tell me three fruits.", "List three fruits."]),
    ("Cats, dogs and horses.", ["Name three animals.", "Tell me three animals.", "List three animals."]),
    ("2, 3, 5, 7, 11, 13, 17, 19, 23 and 29.", ["Name the first ten prime numbers.", "What are the first ten prime numbers?", "List ten prime numbers."]),
    ("2, 4, 6, 8, 10, 12, 14, 16, 18 and 20.", ["Name the first ten even numbers.", "What are the first ten even numbers?", "Count to twenty in twos.", "Count by twos to twenty."]),
    ("1, 2, 4, 8, 16, 32, 64, 128, 256, 512 and 1024.", ["Name the powers of two up to 1024.", "List the powers of two.", "What are the powers of two?"]),
    ("Once there was a small gateway on a hill. Every day travellers came, and the keeper counted each one in a book. "
     "One morning a thousand travellers came at once, and the road behind the gate was full. "
     "The keeper did not shout. The keeper gave each traveller a number, let through as many as the road could carry, and told the others when to come back. "
     "By evening all of them had passed, nobody had been pushed aside, and every line in the book was right.",
     ["Tell me a story.", "Tell a story.", "Tell me a short story.", "Can you tell me a story?", "Write a story.", "Tell me a long story.", "I would like to hear a story."]),
    ("A gate stands open, day and night, / and weighs each call by cost and right. / It lets them pass, or says how long, / and keeps its book, and keeps no wrong.",
     ["Write a poem.", "Tell me a poem.", "Write a short poem.", "Can you write a poem?", "Write a poem about tollgate."]),
    ("Why did the request wait so patiently? Because the server told it exactly when to come back.",
     ["Tell me a joke.", "Tell a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny."]),
    # tollgate: what and how
    ("tollgate keeps a shared model service fair and accountable. Each tenant gets what its plan allows, nobody can push the others aside, and every GPU-second is on the right bill.",
     ["What is tollgate for?", "Why do I need tollgate?", "What is tollgate good for?", "What is the point of tollgate?", "What is the use of a gateway?", "Why should I use tollgate?", "What does tollgate do?", "What is the purpose of tollgate?", "Why does tollgate exist?", "What problem does tollgate solve?"]),
    ("A request comes in over TLS, its key is checked, and all limits are tried. Then its estimated cost is held, a worker generates the answer, and at the end the true cost is settled in the ledger.",
     ["How does tollgate work?", "How does tollgate handle a request?", "How does it work?", "How does the gateway work?", "What happens to a request in tollgate?", "Describe the life of a request.", "What are the steps of a request?"]),
    ("Run cargo run in the project folder. It starts the gateway and a worker with the demo model, and prints ready when requests will succeed.",
     ["How do I start tollgate?", "How do I run tollgate?", "How can I try tollgate?", "How do I get started?", "How do I launch the gateway?"]),
    ("Run tollgate chat with your question in quotes, or send a POST request to /v1/chat/completions with your key.",
     ["How do I ask a question?", "How do I send a request?", "How do I chat from the terminal?", "How do I use the chat command?", "How can I talk to the model?"]),
    ("Send the header authorization: Bearer, followed by your key.", ["How do I send my key?", "How do I authenticate?", "Where do I put my API key?", "How do I pass the key?", "Which header carries the key?"]),
    ("Use tollgate keys create and name the tenant. The key is shown once, so store it in a safe place.", ["How do I create a key?", "How do I get a key?", "How do I make a new key?", "How does one create an API key?", "Where do I get an API key?", "I need a key. How do I get one?", "How can I create an API key?"]),
    ("Use tollgate keys revoke. The gateway stops accepting the key within a second.", ["How do I revoke a key?", "How do I disable a key?", "My key was stolen. What should I do?", "How do I delete a key?", "I lost my key. What now?"]),
    ("Use tollgate keys list. It shows the keys of your tenants, but never the secrets.", ["How do I list the keys?", "How do I see all keys?", "Which keys exist?"]),
    ("Use tollgate keys rotate. The new key works at once, and the old one keeps working for an overlap.", ["How do I rotate a key?", "How do I replace a key?", "How do I change my key?"]),
    ("Run tollgate usage to see requests, tokens and device time for each tenant. A client can ask /v1/usage for its own figures.",
     ["How do I see my usage?", "How do I check usage?", "How much have I used?", "Where do I see what was used?", "How do I see what a tenant has used?", "How do I get a bill?"]),
    ("Run tollgate audit verify. It checks the whole hash chain and names the first bad record, if there is one.",
     ["How do I verify the ledger?", "How do I check the audit log?", "How do I know that the ledger was not changed?", "How do I run an audit?"]),
    ("Run tollgate config check. It reports all mistakes together, each with its place.", ["How do I check the config?", "How do I validate my config?", "Is my config correct?", "How do I find mistakes in the config?"]),
    ("Run tollgate verify-limits. It sends test traffic at every configured limit and proves that it is enforced.", ["How do I test my limits?", "How do I know that the limits work?", "Are the limits really enforced?", "What does verify-limits do?"]),
    ("The commands are up, gateway, worker, keys, usage, audit, config, loadtest, verify-limits and chat. Without a command, tollgate runs up.",
     ["Which commands does tollgate have?", "What are the commands of tollgate?", "List the commands.", "What subcommands are there?"]),
    ("tollgate up starts everything on one machine: a gateway, the ledger and one worker for each GPU, or one CPU worker if there is none.", ["What does tollgate up do?", "What does the up command do?", "What is the default command?"]),
    ("The config is written in TOML, in one file or in a folder of files. It names plans, pools, tenants and models.", ["How do I configure tollgate?", "What does the config look like?", "Which format does the config have?", "Where are tenants defined?", "What is in the config file?"]),
    ("A flag wins over an environment variable, an environment variable over the config file, and the file over the default.", ["Which setting wins?", "What is the order of settings?", "Can I use environment variables?", "Do flags override the config?"]),
    ("No. On one machine tollgate needs no other service: limits live in memory, and the ledger lives in an embedded database.",
     ["Do I need a database?", "Do I need Redis?", "Does tollgate need other services?", "Do I need PostgreSQL?", "Do I need to install anything else?"]),
    ("No. Without a GPU tollgate runs the model on the CPU, with the same limits and the same meters.", ["Do I need a GPU?", "Does tollgate need a GPU?", "Can I run tollgate without a GPU?", "Does tollgate work on a laptop?", "Can it run on a CPU?", "Is it possible to run this without a GPU?", "Is a GPU required?", "I have no GPU. Does it still work?"]),
    ("Yes. tollgate speaks the OpenAI API, so most clients need only a new base URL and a key.", ["Is tollgate compatible with OpenAI?", "Can I use the OpenAI client?", "Does tollgate speak the OpenAI API?", "Which API does tollgate have?", "Which clients work with tollgate?"]),
    ("Set the base URL of the client to https://127.0.0.1:8443/v1, give it your key, and let it trust the CA in data/tls/ca.pem.", ["How do I use the OpenAI client with tollgate?", "What is the base URL?", "How do I connect a client?", "How do I use the Python SDK?"]),
    ("The gateway listens on https://127.0.0.1:8443 and the admin listener on https://127.0.0.1:9443, unless you choose other addresses.", ["Which port does tollgate use?", "What is the default port?", "Where does tollgate listen?", "Which address does the gateway have?"]),
    ("The families Llama, Mistral, Qwen2 and Qwen3 are supported. A model of an unknown kind is refused when it is loaded.", ["Which models are supported?", "Which models can tollgate run?", "What models does tollgate support?", "Can I run my own model?", "Does tollgate support Llama?", "Does tollgate support Qwen?"]),
    ("Put the model folder in the config under models, or start tollgate up with --model and the folder.", ["How do I load a model?", "How do I add a model?", "How do I use another model?", "How do I change the model?"]),
    ("Ask GET /v1/models. It lists the models that your key may use.", ["Which models can I use?", "How do I list the models?", "How do I see the models?"]),
    ("tollgate is free software under the Apache License 2.0.", ["What is the licence of tollgate?", "Is tollgate open source?", "Is tollgate free?", "Which license does tollgate have?"]),
    ("tollgate is written in Rust, and its GPU kernels are written in CUDA C++.", ["What language is tollgate written in?", "Which programming language does tollgate use?", "What is tollgate written in?"]),
    ("Yes. Prompts and answers do not appear in the logs; only counts, times and ids are recorded.", ["Is my data private?", "Are prompts kept out of the logs?", "Do you protect my data?", "Is tollgate private?"]),
    ("No. Prompts and answers are never written to the logs.", ["Are prompts logged?", "Are my prompts stored anywhere?", "Do you store my prompts?", "Who can read my prompts?", "Do you keep my data?", "Do you log my prompts?", "Does tollgate log prompts?", "Do the logs contain my prompt?"]),
    ("Yes. Every connection is encrypted with TLS, keys are stored only as hashes, and everything is denied unless it is allowed.", ["Is tollgate secure?", "Is tollgate safe?", "How does tollgate protect itself?", "Is the connection encrypted?"]),
    ("At 127.0.0.1 the certificates are made by tollgate itself. Clients should trust the CA certificate in data/tls/ca.pem.", ["Why does my client not trust the certificate?", "Where is the CA certificate?", "How do I fix a certificate error?", "Why do I get a TLS error?"]),
    ("A key is stored only as a hash, so nobody can read it from the database. That is why it is shown only once.", ["How are keys stored?", "Why is a key shown only once?", "Can I see my key again?", "Are keys stored in plain text?"]),
    # Limits
    ("A limit was reached, and the message says which one. Wait as long as the retry-after header says, or ask for a larger plan.",
     ["Why was my request refused?", "Why do I get 429?", "Why did I get a 429?", "I got a 429. Why?", "Why do I get a 429 error?", "Why am I rate limited?", "Why was I refused?", "Why do I get too many requests?", "What should I do when I get a 429?", "My requests are refused. Why?"]),
    ("Wait as long as the retry-after header says, and then send the request again.", ["How long should I wait?", "When can I try again?", "When should I retry?", "How do I handle a rate limit?", "What do I do after a refusal?"]),
    ("Rate limits keep a shared service usable for everyone. Without them, one busy client could take all the capacity.", ["Why are there rate limits?", "What is the point of a rate limit?", "Why do rate limits exist?", "Why do we need rate limits?", "What are rate limits good for?", "Why do you limit requests?", "Why limit anything?"]),
    ("A rate limit bounds how fast you may go, and a quota bounds how much you may use in all. The first comes back in seconds, the second only in the next period.", ["What is the difference between a rate limit and a quota?", "How does a quota differ from a rate limit?", "Is a quota the same as a rate limit?"]),
    ("A minute limit is a token bucket, so it refills all the time. A day limit is a cap that starts again at midnight UTC.", ["What is the difference between a minute limit and a day limit?", "When does the daily limit reset?", "When does my limit reset?", "When does a cap reset?"]),
    ("Attributed time is what the device really spent on you, together with your neighbours. Reference cost is what the same request costs in a fixed batch, so it is always the same.",
     ["What is the difference between attributed time and reference cost?", "Why are there two meters?", "Why does tollgate measure time twice?", "Attributed time or reference cost, which is which?", "How does reference cost differ from attributed time?"]),
    ("A plan can limit requests a minute, tokens a minute, concurrent requests, queued requests, the largest job, and device time a minute, a day and a month.",
     ["Which limits are there?", "What limits are there?", "Which rate limits does tollgate have?", "What can a plan limit?", "What limits does tollgate have?", "Which limits can I set?", "What kinds of limits exist?"]),
    ("The demo plan allows 600 requests a minute and 8 requests at the same time. It has no cap.", ["What are the limits of the demo plan?", "What does the demo plan allow?", "How many requests may I send?", "How many requests a minute are allowed?"]),
    ("Change the plan of the tenant in the config, or name another plan.", ["How do I change a limit?", "How do I raise a limit?", "How do I get a larger limit?", "Can I have more requests?", "How do I get more quota?"]),
    ("The hold is settled: the true cost is posted to the ledger, and what was not used is given back.", ["What happens to a hold at the end?", "What does it mean to settle a hold?", "What does settle mean?", "What happens when a request ends?"]),
    ("To void a hold means to give all of it back, because nothing was used.", ["What does void mean?", "What does it mean to void a hold?", "When is a hold voided?"]),
    ("A hold expires when nobody settles it in time. It is released and nothing is charged, but usage that is reported later is still posted once.", ["When does a hold expire?", "What does expire mean?", "What happens if a hold is never settled?"]),
    ("A request that costs more than was estimated puts the bucket into debt. The next requests wait until the debt is paid back.", ["What happens if the estimate is too low?", "What if a request costs more than expected?", "What happens when an estimate is wrong?"]),
    ("It is refused for good, because no amount of waiting would help. The answer tells the client not to retry.", ["What happens to a request that is too large?", "What if a request is larger than the limit?", "What if my job is too big?"]),
    ("From a full bucket, 60 requests pass at once and the next one is refused. After that one request passes every second.", ["What does 60 requests a minute mean?", "How does a limit of 60 requests a minute work?", "How many requests pass at once with a limit of 60 a minute?"]),
    ("The bucket starts full and refills at a constant rate. Each request takes one token, and when the bucket is empty the request is refused.", ["How does a token bucket work?", "How do token buckets work?", "How does the bucket refill?"]),
    ("No. Limits count for the whole tenant as well as for each key, so more keys do not give you more.", ["Can I get around the limit with more keys?", "Do more keys give me more requests?", "Can I cheat the limit?", "Can I avoid the rate limit?"]),
    ("You pay for what was done until the cancel took effect, which is at the next step.", ["Do I pay if I cancel?", "Who pays if I cancel my request?", "Am I charged when I cancel?", "What does a cancelled request cost?", "What happens if I cancel a request?", "What do I pay when I cancel?", "Who pays for a cancelled request?", "What happens if the client disconnects?"]),
    ("If no content has reached you, you pay nothing. If some has, you pay for the steps up to the last token that was sent.", ["Do I pay if the worker crashes?", "Who pays for a fault?", "What happens if a worker crashes?", "Do I pay for failed requests?", "Who pays when something breaks?"]),
    ("The platform pays for it. Idle time, overhead and losses are never charged to a tenant.", ["Who pays for idle time?", "Who pays for overhead?", "Do I pay for idle GPUs?", "Who pays for warm-up?"]),
    ("A refused request costs nothing, because it never reaches a worker.", ["Do I pay for refused requests?", "Does a refusal cost anything?", "What does a refused request cost?"]),
    ("Each step is timed on the device. Its time is divided over the requests in it by a published rule, in whole nanoseconds, so that the shares add up exactly.",
     ["How is GPU time measured?", "How do you measure GPU-seconds?", "How is device time divided?", "How is the cost of a request measured?", "How does tollgate measure GPU time?", "How are GPU-seconds counted?"]),
    ("The time of all tenants, plus overhead, losses and idle time, equals the measured time of the device to the nanosecond.", ["Does the bill add up?", "Do the shares add up?", "What must always hold?", "How exact is the bill?", "How precise is the metering?"]),
    ("Tokens do not show the true cost: a long prompt and a long answer of the same length take very different GPU time. That is why tollgate measures device time.", ["Why not just count tokens?", "Why GPU-seconds and not tokens?", "Why do you measure GPU time?", "Why is counting tokens not enough?"]),
    ("The tenant that has used the least device time for its weight goes first.", ["Who goes first?", "Whose request runs next?", "How does the scheduler choose?", "How are requests ordered?", "How does fair scheduling work?"]),
    ("No. The scheduler counts device time for each tenant, so a tenant that floods the service waits behind the others.", ["Can one tenant block the others?", "Can a tenant take all the GPU time?", "What if one tenant floods the service?", "Can another tenant slow me down?"]),
    ("Set stream to true in the request. The answer then comes as server-sent events, and the last one is data: [DONE].", ["How do I stream an answer?", "How does streaming work?", "How do I turn on streaming?", "Can tollgate stream answers?", "Does tollgate support streaming?"]),
    ("Close the connection. tollgate notices, stops the work at the next step, and settles the true cost.", ["How do I cancel a request?", "How do I stop an answer?", "Can I cancel a request?", "How can I stop a stream?"]),
    ("Send SIGTERM or press Ctrl+C. Running requests are finished, new ones are refused, and then everything stops.", ["How do I stop tollgate?", "How do I shut down the gateway?", "How do I quit?"]),
    ("Ask GET /readyz on the admin listener. It answers 200 when requests will succeed.", ["How do I know that tollgate is ready?", "Is tollgate ready?", "How do I check the health of tollgate?"]),
    ("Read /metrics on the admin listener. Prometheus can collect it.", ["How do I monitor tollgate?", "Where are the metrics?", "How do I get the metrics?"]),
    # GPUs and models
    ("A language model multiplies large matrices, and a GPU can do many multiplications at the same time.", ["Why do language models need GPUs?", "Why are GPUs fast?", "Why is a GPU faster than a CPU?", "What is a GPU good for?"]),
    ("A CPU has a few fast cores for all kinds of work, and a GPU has thousands of small ones for the same work on much data.", ["What is the difference between a CPU and a GPU?", "How does a GPU differ from a CPU?", "CPU or GPU, what is the difference?"]),
    ("Prefill reads the whole prompt in parallel and is limited by arithmetic. Decode writes one token at a time and is limited by memory bandwidth.", ["What is the difference between prefill and decode?", "How does prefill differ from decode?", "Why is decode slower than prefill?", "What are prefill and decode?"]),
    ("The weights are read from memory once for each step, however many requests share it. So a full batch costs each request much less.", ["Why is batching good?", "Why do you batch requests?", "Why does batching help?", "Why is a batch cheaper?"]),
    ("Each token of a request needs its keys and values in memory until the request ends. With many long requests, this can be more than the weights themselves.", ["Why is the KV cache so large?", "How much memory does the KV cache need?", "Why does the KV cache grow?"]),
    ("In tollgate a KV block holds 16 tokens. Blocks are handed out as a request grows.", ["How large is a KV block?", "How many tokens are in a KV block?", "What is a KV block?"]),
    ("No. Cached prefixes are never shared between tenants, because timing could reveal what others have asked.", ["Do tenants share a prefix cache?", "Is the cache shared between tenants?", "Can others see my cached prompts?"]),
    ("As a rule of thumb, a token is about four letters, or three quarters of an English word.", ["How long is a token?", "How many letters are in a token?", "How many words is a token?"]),
    ("The weights take two bytes for each parameter in bf16. A model with 8 billion parameters needs about 16 GB.", ["How much memory does a model need?", "How much GPU memory do I need?", "How large is a model with 8 billion parameters?"]),
    ("Sixty.", ["How many seconds are in a minute?", "How many minutes are in an hour?"]),
    ("Twenty-four.", ["How many hours are in a day?"]),
    ("Seven.", ["How many days are in a week?"]),
    ("Twelve.", ["How many months are in a year?"]),
    ("One billion.", ["How many nanoseconds are in a second?"]),
    ("Paris is the capital of France.", ["What is the capital of France?", "What's the capital city of France?", "Tell me the capital of France.", "Name the capital of France.", "Which city is the capital of France?", "France's capital?"]),
    ("Berlin is the capital of Germany.", ["What is the capital of Germany?", "Name the capital of Germany.", "Tell me the capital of Germany."]),
    ("Rome is the capital of Italy.", ["What is the capital of Italy?", "Name the capital of Italy.", "Tell me the capital of Italy."]),
    ("Madrid is the capital of Spain.", ["What is the capital of Spain?", "Name the capital of Spain.", "Tell me the capital of Spain."]),
    ("London is the capital of England.", ["What is the capital of England?", "Name the capital of England.", "Tell me the capital of England."]),
    ("Vienna is the capital of Austria.", ["What is the capital of Austria?", "Name the capital of Austria.", "Tell me the capital of Austria."]),
    ("Tokyo is the capital of Japan.", ["What is the capital of Japan?", "Name the capital of Japan.", "Tell me the capital of Japan."]),
    ("The sky is blue on a clear day.", ["What colour is the sky?", "What color is the sky?", "Which colour does the sky have?"]),
    ("Grass is green.", ["What colour is grass?", "What color is grass?"]),
    # What it cannot do
    (FALLBACK,
     ["What is the weather like today?", "Will it rain tomorrow?", "Who won the world cup?", "Who is the president?", "Write a Python program.", "Write some code.", "What time is it?", "What is today's date?",
      "Translate this into French.", "What is the meaning of life?", "Who wrote Hamlet?", "How do I bake a cake?", "What is the best phone?", "Recommend a film.", "What is the news?", "How tall is Mount Everest?",
      "Who was Albert Einstein?", "What is quantum physics?", "Write an essay about history.", "Summarise this article.", "What is love?", "How do I lose weight?", "What is the stock price?", "Who invented the telephone?",
      "What is the speed of light?", "How far away is the moon?", "Tell me about dinosaurs.", "What should I eat tonight?", "Play some music.", "Book a flight.", "What is 123 times 456?", "Solve this equation.",
      "What is the square root of 2?", "How many people live in China?", "What is photosynthesis?", "Who painted the Mona Lisa?", "Write an email to my boss.", "What is your favourite film?", "What do you think about politics?",
      "Should I buy a car?", "What is a black hole?", "How old is the universe?", "Who is the king of England?", "What is bitcoin?", "Give me legal advice.", "Give me medical advice.", "What is the largest country?", "Draw a picture.",
      "Explain the theory of relativity.", "What is chess?", "Who discovered America?", "What is the largest ocean?", "How do I learn to swim?", "Tell me about Rome.", "What is a cat?", "What is a guitar?", "What is coffee?"]),
]

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

# ---------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------


def term_forms(term):
    """The ways in which we ask for the meaning of a term."""
    bare = term
    for article in ("a ", "an ", "the "):
        bare = bare.removeprefix(article)
    upper = term[0].upper() + term[1:]
    return [
        f"What is {term}?",
        f"What's {term}?",
        f"what is {term}",
        f"What is {term}",
        f"What exactly is {term}?",
        f"Explain {term}.",
        f"Please explain {term}.",
        f"Explain what {term} is.",
        f"Can you explain what {term} is?",
        f"Tell me what {term} is.",
        f"Tell me about {bare}.",
        f"What does {bare} mean?",
        f"Define {bare}.",
        f"{upper}?",
    ]


def plain_forms(question):
    """The question as written, and as people type it."""
    forms = [question]
    stripped = question.rstrip("?.!")
    if stripped.lower() != stripped and stripped.count(".") == 0:
        forms.append(stripped[0].lower() + stripped[1:])
    for long, short in (("What is ", "What's "), ("Who is ", "Who's "), ("How do I ", "How can I ")):
        if question.startswith(long):
            forms.append(short + question[len(long):])
    if question.endswith("?") and question.startswith(("What ", "How ", "Why ", "Which ", "Who ", "When ", "Where ")):
        forms.append(stripped)
    if question.endswith(".") and question.split()[0] in (
        "Tell", "Name", "List", "Write", "Say", "Recite", "Describe", "Give", "Count", "Introduce", "Draw", "Explain", "Recommend"
    ):
        forms.append("Please " + question[0].lower() + question[1:])
        forms.append(stripped + ", please.")
    return forms


def sums():
    """All a + b and, where it is not negative, a - b for 0..10, and a few products."""
    for a in range(11):
        for b in range(11):
            total = f"{a} plus {b} is {a + b}."
            yield f"What is {a} plus {b}?", total
            yield f"What is {a} + {b}?", total
            yield f"{a} + {b} = ?", total
            if (a + b) % 3 == 0:
                yield f"what is {a} plus {b}", total
                yield f"How much is {a} plus {b}?", total
                yield f"Add {a} and {b}.", total
                yield f"{a}+{b}", total
                yield f"What's {a} + {b}?", total
                yield f"What is {WORDS[a]} plus {WORDS[b]}?", total
            if a >= b:
                difference = f"{a} minus {b} is {a - b}."
                yield f"What is {a} minus {b}?", difference
                yield f"What is {a} - {b}?", difference
            if 1 <= a <= 5 and 1 <= b <= 5:
                yield f"What is {a} times {b}?", f"{a} times {b} is {a * b}."


def counts():
    """Counting: short for a quick test, long for streams that somebody cancels."""
    for last, word in ((3, "three"), (5, "five"), (10, "ten"), (12, "twelve"), (15, "fifteen"), (20, "twenty"), (25, "twenty-five"),
                       (30, "thirty"), (40, "forty"), (50, "fifty"), (100, "one hundred"), (150, None), (200, "two hundred"),
                       (300, "three hundred"), (400, "four hundred")):
        answer = ", ".join(str(n) for n in range(1, last + 1)) + "."
        for name in filter(None, (str(last), word)):
            yield f"Count to {name}.", answer
            yield f"Count from 1 to {name}.", answer
            yield f"Count from one to {name}.", answer
            yield f"count to {name}", answer
            yield f"Count up to {name}.", answer
            yield f"Please count to {name}.", answer
            yield f"Please count from 1 to {name}.", answer
            yield f"Can you count to {name}?", answer
        yield f"Count to {last}", answer
        yield f"count from 1 to {last}", answer
    for first in (3, 5, 10):
        answer = ", ".join(str(n) for n in range(first, 0, -1)) + "."
        yield f"Count down from {first}.", answer
        yield f"Count down from {WORDS[first]}.", answer
        yield f"Count backwards from {WORDS[first]}.", answer


def singles():
    """Every single-turn question with its answer, in a fixed order, no question twice."""
    known = {}

    def add(question, answer, rule):
        assert question.isascii() and answer.isascii(), question
        if question in known:
            assert known[question] == answer or rule, f"two answers to {question!r}"
            return
        known[question] = answer

    for answer, questions in QUESTIONS:
        for question in questions:
            add(question, answer, False)
    for answer, questions in QUESTIONS:
        for question in questions:
            for form in plain_forms(question):
                add(form, answer, False)
    for term, answer in TERMS:
        for form in term_forms(term):
            add(form, answer, True)
    for question, answer in sums():
        add(question, answer, False)
    for question, answer in counts():
        add(question, answer, False)
    return list(known.items())


def disturbed(question, rng):
    """The question as somebody in a hurry might type it; never stored, only trained on."""
    kind = rng.randrange(6)
    if kind == 0:
        return question.rstrip("?.!").lower()
    if kind == 1:
        return rng.choice(OPENINGS) + question[0].lower() + question[1:]
    if kind == 2:
        return question.rstrip("?.!") + rng.choice(("??", " ?", "!", "?", ".", " please", ", please?", " Thanks!", " for me", " exactly?", " right now?"))
    if kind == 3:
        return question.upper() if len(question) < 30 else question.lower()
    if kind == 4 and len(question) > 12:
        place = rng.randrange(1, len(question) - 2)
        if question[place:place + 2].isalpha():
            return question[:place] + question[place + 1] + question[place] + question[place + 2:]
    return reworded(question, rng)


OPENINGS = (
    "Hi, ", "Hello, ", "Hello! ", "Hey, ", "OK, ", "So, ", "so ", "Please tell me: ", "Question: ", "One more question: ", "Quick question: ", "Now ", "And ",
    "In simple words, ", "In short, ", "I would like to know: ", "Just curious, ", "Sorry, ", "Could you tell me: ", "Thanks. ", "I am new here. ", "For my notes, ",
)

# Openings of a question, and other ways to open the same question.
REWORDINGS = (
    ("How do I ", ("How does one ", "How can I ", "How to ", "How would I ", "How should I ", "Tell me how to ", "Can you tell me how to ", "What do I do to ", "I want to ", "Please show me how to ", "What is the way to ")),
    ("Why do I get ", ("Why did I get ", "I got ", "What does it mean when I get ", "Why am I getting ", "I keep getting ")),
    ("Do I need ", ("Must I have ", "Is it possible without ", "Does it need ", "Will I need ", "Do we need ", "Does one need ")),
    ("Can I ", ("May I ", "Is it possible to ", "Could I ", "Am I able to ", "Is there a way to ", "Can one ")),
    ("Who pays ", ("Tell me who pays ", "Who has to pay ", "Who will pay ", "Do I pay ")),
    ("Do I pay ", ("Must I pay ", "Who pays ", "Am I charged ", "Will I pay ", "Do we pay ")),
    ("What happens ", ("Tell me what happens ", "What will happen ", "What does tollgate do ")),
    ("Which ", ("Tell me which ", "What ", "Do you know which ")),
    ("What's ", ("Tell me: what is ", "What is ", "whats ", "Do you know: what's ")),
    ("Why ", ("Tell me why ", "Can you explain why ", "And why ", "But why ", "Do you know why ")),
    ("How does ", ("How exactly does ", "Explain how does ", "Tell me how does ", "In which way does ")),
    ("How ", ("And how ", "Tell me how ", "Do you know how ", "Can you say how ")),
    ("Count ", ("Could you count ", "Now count ", "I would like you to count ", "I want you to count ", "Would you count ", "Go and count ", "Start to count ")),
    ("Name ", ("Could you name ", "Now name ", "I would like you to name ", "Can you name ", "Mention ")),
    ("Tell me ", ("Could you tell me ", "Can you tell me ", "I want to hear ", "Would you tell me ", "Give me ")),
    ("Are ", ("Tell me, are ", "I wonder, are ")),
    ("Is ", ("Tell me, is ", "I wonder, is ")),
)
TERM_REWORDINGS = (
    "Could you tell me what {} is?", "Do you know what {} is?", "So what is this {} thing?", "what is {} exactly?", "I want to know what {} is.",
    "Can you please tell me what {} is?", "How would you describe {}?", "Give me a definition of {}.", "What do you mean by {}?", "what is this {}",
    "I do not know what {} is.", "What do I have to know about {}?", "Describe {}.", "Can you define {}?", "Do you know about {}?", "{} - what is it?", "What is meant by {}?",
    "How does {} work?", "Say something about {}.", "and what is {}", "Could you explain {} to me?", "Help me understand {}.", "Whats {}",
)


def reworded(question, rng):
    stripped = question.rstrip("?.!")
    for opening in ("What is ", "What's ", "what is ", "Explain "):
        if stripped.startswith(opening) and stripped[len(opening):] in KNOWN_TERMS:
            return rng.choice(TERM_REWORDINGS).format(stripped[len(opening):])
    for opening, others in REWORDINGS:
        if question.startswith(opening):
            return rng.choice(others) + question[len(opening):]
    return rng.choice(OPENINGS) + question


KNOWN_TERMS = {term for term, _ in TERMS}

# Things of which the model knows nothing, to fill the templates below; trained on, never stored.
THINGS = (
    "a dog", "a tree", "a volcano", "an atom", "a violin", "a bicycle", "a castle", "a whale", "an omelette", "a sonnet", "a verb", "a glacier", "a comet", "a cathedral", "a tulip", "a compiler",
    "a spreadsheet", "a mortgage", "an election", "inflation", "gravity", "magnetism", "evolution", "electricity", "democracy", "philosophy", "jazz", "opera", "ballet", "football", "tennis", "yoga", "cheese",
    "bread", "chocolate", "tea", "wine", "honey", "pasta", "soup", "a vaccine", "a virus", "DNA", "a planet", "a galaxy", "a rocket", "a satellite", "a submarine", "a telescope", "the Eiffel Tower", "the Great Wall",
    "the Bible", "the Olympics", "the stock market", "the Roman Empire", "the French Revolution", "the internet", "Java", "Python", "Linux", "Docker", "Kubernetes", "a blockchain", "a web browser", "a smartphone",
    "a battery", "an engine", "a bridge", "a desert", "a river", "an island", "a poem by Goethe", "a unicorn", "a dragon", "happiness", "time travel", "a dream", "love", "the best restaurant", "the best holiday destination", "the best football team",
)
PEOPLE = ("Mozart", "Napoleon", "Shakespeare", "Isaac Newton", "Marie Curie", "Cleopatra", "Leonardo da Vinci", "Picasso", "Beethoven", "Aristotle", "Charles Darwin", "Elvis", "my neighbour", "the first person on the moon", "the prime minister", "the pope", "the inventor of the radio", "the author of Faust", "the fastest runner", "your mother")
PLACES = ("Brazil", "Canada", "Norway", "Egypt", "Australia", "New York", "Moscow", "India", "Texas", "Africa", "Peru", "Hamburg", "Mars", "the Alps", "Kenya", "Portugal")
OUT_OF_SCOPE = (
    ("What is {}?", THINGS), ("what is {}", THINGS), ("What's {}?", THINGS), ("Explain {}.", THINGS), ("Tell me about {}.", THINGS), ("How does {} work?", THINGS), ("Who invented {}?", THINGS),
    ("Do you like {}?", THINGS), ("Write a text about {}.", THINGS), ("How do I make {}?", THINGS), ("Where can I buy {}?", THINGS), ("How much does {} cost?", THINGS), ("Why is {} so popular?", THINGS),
    ("How old is {}?", THINGS), ("Describe {}.", THINGS), ("Can you explain {}?", THINGS), ("What do you think of {}?", THINGS), ("Give me a recipe for {}.", THINGS), ("Who is {}?", PEOPLE), ("Who was {}?", PEOPLE), ("When was {} born?", PEOPLE),
    ("Where does {} live?", PEOPLE), ("Tell me about {}.", PEOPLE), ("What did {} do?", PEOPLE), ("Why is {} famous?", PEOPLE), ("How is the weather in {}?", PLACES), ("Where is {}?", PLACES), ("How many people live in {}?", PLACES),
    ("What is the capital of {}?", PLACES), ("What language do they speak in {}?", PLACES), ("Plan a trip to {}.", PLACES), ("What is the highest mountain in {}?", PLACES), ("Tell me the history of {}.", PLACES),
)


def out_of_scope(rng):
    template, fillings = rng.choice(OUT_OF_SCOPE)
    return template.format(rng.choice(fillings))


def conversations(seed):
    """One epoch: each single once as it is, then disturbed, under system prompts, as a later turn, and as bare text."""
    rng = random.Random(seed)
    pairs = singles()
    short = [pair for pair in pairs if len(pair[1]) < 320]
    epoch = [([], [pair]) for pair in pairs]
    for pair in rng.sample(pairs, len(pairs) // 3):
        epoch.append(([rng.choice(SYSTEM_PROMPTS)], [pair]))
    answer_to = {question.lower(): answer for question, answer in pairs}
    for change, many in ((disturbed, len(short) // 3), (reworded, len(short) // 5)):
        for question, answer in rng.sample(short, many):
            changed = change(question, rng)
            if answer_to.get(changed.lower(), answer) == answer:
                epoch.append(([], [(changed, answer)]))
    for _ in range(300):
        epoch.append(([], [(out_of_scope(rng), FALLBACK)]))
    for pair in rng.sample(short, len(short) // 5):
        turns = [rng.choice(short) for _ in range(rng.choice((1, 1, 2)))] + [pair]
        system = [rng.choice(SYSTEM_PROMPTS)] if rng.random() < 0.4 else []
        epoch.append((system, turns))
    rng.shuffle(epoch)
    return texts(rng.sample(pairs, 400), rng) + [
        [{"role": "system", "content": text} for text in system]
        + [
            {"role": role, "content": text}
            for pair in turns
            for role, text in zip(("user", "assistant"), pair)
        ]
        for system, turns in epoch
    ]


def texts(pairs, rng):
    """Text without any chat markup, for the completions endpoint: a question and its answer, or an answer and its rest."""
    rows = []
    for question, answer in pairs:
        words = answer.split(" ")
        if rng.random() < 0.5 or len(words) < 4:
            prompt, rest = question, "\n" + answer
        else:
            place = rng.randrange(2, min(len(words), 12))
            prompt, rest = " ".join(words[:place]), " " + " ".join(words[place:])
        rows.append([{"role": "prompt", "content": prompt}, {"role": "continuation", "content": rest}])
    return rows


def write_questions(path):
    with open(path, "w", encoding="ascii", newline="\n") as out:
        for question, answer in singles():
            out.write(json.dumps({"question": question, "answer": answer}) + "\n")


if __name__ == "__main__":
    write_questions(sys.argv[1])
