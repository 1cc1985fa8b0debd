"use strict";
(() => {
  // Texts of others (ids, names) reach the page by textContent and setAttribute alone.
  const PERIOD_MS = 1000, FIRST_PAUSE_MS = 1000, MOST_PAUSE_MS = 15000, ANSWER_MS = 10000;
  // Up to so many seats are cards, and up to so many have a number in the map.
  const MOST_CARDS = 16, MOST_NUMBERS = 64;
  const SHAPES = {
    ready: "M8 1a7 7 0 1 1 0 14A7 7 0 0 1 8 1Z",
    starting: "M8 1a7 7 0 1 1 0 14A7 7 0 0 1 8 1Zm0 2.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 0 0 0-9Z",
    recovering: "M8 1 15.5 14.5H.5Z",
    draining: "M2 2h12v12H2Z",
    down: "m3 1 5 5 5-5 2 2-5 5 5 5-2 2-5-5-5 5-2-2 5-5-5-5Z",
    unknown: "M3 6.5a1.5 1.5 0 1 1 0 3a1.5 1.5 0 0 1 0-3Zm5 0a1.5 1.5 0 1 1 0 3a1.5 1.5 0 0 1 0-3Zm5 0a1.5 1.5 0 1 1 0 3a1.5 1.5 0 0 1 0-3Z",
  };
  SHAPES.unreachable = SHAPES.gone = SHAPES.down;

  const $ = (id) => document.getElementById(id);
  let token = "", timer = 0, isAsking = false, numFailures = 0, told = null, toldAt = 0, retryAt = 0;

  // What is written.

  function set(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  function show(node, isShown) {
    if (node.hidden === isShown) node.hidden = !isShown;
  }

  function duration(s) {
    if (s === null || s === undefined) return "-";
    if (s < 0.001) return s ? `${(1000 * s).toFixed(2)} ms` : "0 ms";
    if (s < 1) return `${(1000 * s).toFixed(s < 0.1 ? 1 : 0)} ms`;
    if (s < 60) return Number.isInteger(s) ? `${s} s` : `${s.toFixed(1)} s`;
    const minutes = Math.floor(s / 60);
    if (minutes < 60) return `${minutes} min ${Math.floor(s % 60)} s`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  }

  const percent = (share) => (share === null ? "-" : `${Math.round(100 * share)} %`);
  const rate = (value) => (value === null ? "-" : value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
  const count = (value) => value.toLocaleString("en");
  const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1)} GiB`;

  function rows(body, lines, bad = () => false) {
    const written = JSON.stringify(lines);
    if (body.dataset.written === written) return;
    body.dataset.written = written;
    body.replaceChildren(...lines.map((cells, place) => {
      const row = document.createElement("tr");
      row.append(...cells.map((text, column) => {
        const cell = document.createElement(column ? "td" : "th");
        if (!column) cell.scope = "row";
        cell.textContent = text;
        return cell;
      }));
      row.classList.toggle("is-bad", bad(place));
      return row;
    }));
  }

  // The parts of the page.

  function drawState(state, words) {
    if ($("pill").dataset.state !== state || !$("shape").getAttribute("d")) {
      $("pill").dataset.state = state;
      $("shape").setAttribute("d", SHAPES[state] || SHAPES.unknown);
    }
    set($("state"), { gone: "no gateway", unreachable: "no answer" }[state] || state);
    set($("words"), words);
  }

  function drawSpark(name, label, history) {
    const points = history.filter((one) => one[name] !== null).map((one) => [60 - Math.min(one.age_s, 60), one[name]]);
    const most = Math.max(...points.map((point) => point[1]), 0);
    const line = points.map(([x, y]) => `${x.toFixed(2)} ${(19 - 17 * (most ? y / most : 0)).toFixed(2)}`);
    const svg = $(`${label}-spark`), last = points.length - 1;
    svg.querySelector(".line").setAttribute("d", line.length ? `M${line.join("L")}` : "");
    const area = `M${points[0]?.[0].toFixed(2)} 20L${line.join("L")}L${points[last]?.[0].toFixed(2)} 20Z`;
    svg.querySelector(".area").setAttribute("d", line.length ? area : "");
    const now = points.length ? rate(points[last][1]) : "-";
    svg.setAttribute("aria-label", `${label} tokens per second over the last minute: now ${now}, at most ${rate(most)}`);
    set($(`${label}-most`), `last minute, most ${rate(most)}`);
  }

  function drawLoad(facts) {
    set($("running"), count(facts.num_running));
    set($("max-running"), `of ${count(facts.max_running)}`);
    const share = facts.max_total_tokens ? facts.num_used_tokens / facts.max_total_tokens : null;
    set($("context"), `${percent(share)} of context`);
    set($("waiting"), count(facts.num_waiting));
    set($("oldest"), facts.num_waiting ? `oldest for ${duration(facts.oldest_waiting_s)}` : "nobody waits");
    $("queue").classList.toggle("is-full", facts.num_waiting > 0);
    set($("generated"), rate(facts.generated_per_s));
    set($("prompt"), rate(facts.prompt_per_s));
    drawSpark("generated_per_s", "generated", facts.history);
    drawSpark("prompt_per_s", "prompt", facts.history);
    const latencies = facts.latencies;
    const span = latencies.window_s === null ? "since start" : "last minute";
    for (const [id, found] of [["ttft", latencies.time_to_first_token], ["itl", latencies.inter_token]]) {
      set($(`${id}-p50`), duration(found.p50_s));
      set($(`${id}-p99`), found.num ? `half within; 99 % in ${duration(found.p99_s)}, ${span}` : `none, ${span}`);
    }
    const cache = facts.prefix_cache;
    set($("hits"), percent(cache.hit_rate === null ? cache.hit_rate_since_start : cache.hit_rate));
    set($("hits-all"), cache.hit_rate === null ? "of prompts, since start" : `of prompts; ${percent(cache.hit_rate_since_start)} since start`);
  }

  // A seat is made once, and told anew.
  function makeSeat(index) {
    const seat = document.createElement("li");
    const part = (name, parent) => {
      const node = document.createElement(name === "track" || name === "fill" || name === "line" || name === "detail" || name === "request" ? "div" : "span");
      node.className = name;
      parent.append(node);
      seat[name] = node;
      return node;
    };
    const line = part("line", seat);
    part("index", line).textContent = String(index);
    const name = part("name", line);
    part("word", name);
    part("letter", name).setAttribute("aria-hidden", "true");
    const number = part("rate", line);
    part("number", number);
    part("unit", number);
    part("request", seat);
    part("detail", seat);
    part("fill", part("track", seat));
    return seat;
  }

  const LETTERS = { decode: "D", prefill: "P", free: "\u00b7" };

  function detailOf(seat, contextLen) {
    if (seat.state === "free") return seat.cached_tokens ? `keeps ${count(seat.cached_tokens)} tokens` : "empty";
    if (seat.state === "prefill") return `${count(seat.computed_tokens)} of ${count(seat.prompt_tokens)} prompt tokens`;
    const used = seat.prompt_tokens + seat.generated_tokens;
    return `${count(seat.generated_tokens)} tokens, context ${percent(contextLen ? used / contextLen : null)}`;
  }

  function requestOf(seat) {
    if (seat.request === null) return "";
    return seat.choice ? `${seat.request} #${seat.choice}` : seat.request;
  }

  function drawSeat(node, seat, facts) {
    const name = `seat ${seat.state}`;
    if (node.className !== name) node.className = name;
    const hasRate = seat.tokens_per_s !== null, text = requestOf(seat);
    set(node.word, seat.state);
    set(node.letter, LETTERS[seat.state] || "?");
    const isMap = facts.num_slots > MOST_CARDS;
    set(node.number, hasRate ? (isMap ? String(Math.round(seat.tokens_per_s)) : rate(seat.tokens_per_s)) : "");
    set(node.unit, hasRate ? " tok/s" : "");
    set(node.request, text);
    const detail = detailOf(seat, facts.context_len);
    set(node.detail, detail);
    const title = isMap ? `seat ${seat.index}, ${[seat.state, text, detail, hasRate ? `${rate(seat.tokens_per_s)} tok/s` : ""].filter(Boolean).join(", ")}` : "";
    if (node.title !== title) node.title = title;
    node.fill.style.transform = `scaleX(${seat.progress === null ? 0 : Math.max(seat.progress, 0.01)})`;
  }

  function drawSeats(report) {
    const facts = report.facts, slots = facts.slots, list = $("seats");
    const numBusy = facts.num_running, of = (state) => (slots ? slots.filter((seat) => seat.state === state).length : null);
    set($("num-decode"), slots ? `${of("decode")} decode` : `${numBusy} taken`);
    set($("num-prefill"), slots ? `${of("prefill")} prefill` : "");
    set($("num-free"), `${slots ? of("free") : facts.num_slots - numBusy} free`);
    show($("num-prefill").parentElement, slots !== null);
    show($("slots-note"), slots === null);
    set($("slots-note"), report.slots_note || "");
    show(list, slots !== null);
    show($("seats-details"), slots !== null);
    if (slots === null) return;
    list.className = facts.num_slots <= MOST_CARDS ? "seats" : facts.num_slots <= MOST_NUMBERS ? "seats map" : "seats map tiny";
    while (list.children.length > slots.length) list.lastChild.remove();
    while (list.children.length < slots.length) list.append(makeSeat(slots[list.children.length].index));
    slots.forEach((seat, place) => drawSeat(list.children[place], seat, facts));
    if ($("seats-details").open) drawTable(slots);
  }

  function drawTable(slots) {
    rows($("seats-table"), slots.map((seat) => [
      String(seat.index), seat.state, requestOf(seat) || "-", count(seat.prompt_tokens), count(seat.generated_tokens),
      count(seat.cached_tokens), percent(seat.progress), rate(seat.tokens_per_s),
    ]));
  }

  function drawRanks(ranks) {
    rows($("ranks"), ranks.map((rank) => [
      String(rank.rank), rank.is_up ? "up" : "down", rank.device || "-",
      rank.device_memory_bytes ? `${gib(rank.memory_bytes)} of ${gib(rank.device_memory_bytes)}` : gib(rank.memory_bytes),
    ]), (place) => !ranks[place].is_up);
  }

  function drawEnds(requests) {
    rows($("ends"), requests.map((end) => [end.words, count(end.num), count(end.num_lately)]),
      (place) => requests[place].is_fault && requests[place].num_lately > 0);
  }

  function draw(report) {
    told = report;
    toldAt = performance.now();
    show($("token-form"), false);
    show($("forget"), token !== "");
    drawState(report.state, report.words);
    set($("model"), report.model || "Status");
    set($("note"), report.note || "");
    show($("note"), Boolean(report.note));
    const facts = report.facts;
    show($("facts"), facts !== null);
    document.title = facts ? `${report.state} ${facts.num_running}/${facts.max_running} \u2013 ${report.model || "Slotwise"}` : `${report.state} \u2013 Slotwise`;
    if (facts) {
      set($("uptime"), duration(Math.floor(facts.uptime_s)));
      set($("epoch"), count(facts.epoch));
      set($("recoveries"), count(facts.num_recoveries));
      drawLoad(facts);
      drawSeats(report);
      drawRanks(facts.ranks);
      drawEnds(facts.requests);
    }
    drawAge();
  }

  // What is wrong, and how old the values are.
  function drawAge() {
    const parts = [], isGone = numFailures > 0, isOld = isGone || Boolean(told?.is_old);
    if (isGone) parts.push("The gateway does not answer.");
    else if (told?.is_gateway_draining) parts.push("This gateway shuts down.");
    if (isOld && told?.facts) {
      const since = (performance.now() - toldAt) / 1000 + told.age_s;
      parts.push(`These values are ${duration(Math.round(since))} old.`);
    }
    if (isGone && retryAt) parts.push(`Next try in ${Math.max(0, Math.ceil((retryAt - performance.now()) / 1000))} s.`);
    else if (isOld) parts.push("The server is asked again each second.");
    set($("banner-text"), parts.join(" "));
    show($("banner"), parts.length > 0);
    show($("again"), isGone);
    $("facts").classList.toggle("is-old", isOld);
  }

  // What is asked.

  function askIn(ms) {
    clearTimeout(timer);
    timer = setTimeout(ask, ms);
  }

  function fail() {
    numFailures += 1;
    const pause = Math.min(FIRST_PAUSE_MS * 2 ** (numFailures - 1), MOST_PAUSE_MS);
    retryAt = performance.now() + pause;
    drawState("gone", "");
    document.title = "no gateway \u2013 Slotwise";
    drawAge();
    askIn(pause);
  }

  function wantToken() {
    numFailures = 0;
    const was = token;
    token = "";
    told = null;
    show($("facts"), false);
    show($("forget"), false);
    drawState("unknown", "");
    set($("state"), "locked");
    set($("token-words"), was ? "The server does not know this token." : "This server tells its state to callers with a token only.");
    show($("token-form"), true);
    drawAge();
    $("token").focus();
  }

  async function ask() {
    // A tab that comes into view asks by itself.
    if (isAsking || document.hidden) return;
    isAsking = true;
    retryAt = 0;
    try {
      const headers = token ? { Authorization: `Bearer ${token}` } : {};
      const answer = await fetch("status.json", { headers, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
      if (answer.status === 401) return wantToken();
      if (!answer.ok) return fail();
      const report = await answer.json();
      numFailures = 0;
      draw(report);
      askIn(PERIOD_MS);
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof DOMException || error instanceof SyntaxError)) throw error;
      fail();
    } finally {
      isAsking = false;
    }
  }

  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("token").value.trim();
    if (!/^[\x21-\x7e]{1,4096}$/.test(given)) return set($("token-words"), "A token is printable ASCII without blanks.");
    token = given;
    $("token").value = "";
    askIn(0);
  });
  $("forget").addEventListener("click", () => {
    token = "";
    askIn(0);
  });
  $("again").addEventListener("click", () => askIn(0));
  $("seats-details").addEventListener("toggle", () => {
    if (told?.facts?.slots) drawTable(told.facts.slots);
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) askIn(0);
  });
  setInterval(() => {
    if (!document.hidden && !$("banner").hidden) drawAge();
  }, 1000);

  drawState("unknown", "");
  set($("state"), "asking");
  show($("app"), true);
  ask();
})();
