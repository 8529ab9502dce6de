// Draws what /stream says, a picture a second. No library, nothing from elsewhere.
"use strict";

const COLOURS = ["#cbd5e1", "#60a5fa", "#2563eb", "#f59e0b", "#dc2626"];
const byId = (id) => document.getElementById(id);
const whole = (n) => Math.round(n).toLocaleString("en");
const share = (x) => (x === null || x === undefined ? "-" : (100 * x).toFixed(1) + " %");
let boxes = [];

function bytesText(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= size) return (n / size).toFixed(1) + " " + unit;
  return n + " B";
}

function context(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = Number(canvas.getAttribute("data-height") || canvas.height);
  canvas.setAttribute("data-height", height);
  canvas.style.height = height + "px";
  canvas.width = width * scale;
  canvas.height = height * scale;
  const draw = canvas.getContext("2d");
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  return [draw, width, height];
}

function drawPool(pool) {
  const [draw, width, height] = context(byId("pool"));
  const states = Uint8Array.from(atob(pool.states), (c) => c.charCodeAt(0));
  const columns = Math.max(1, Math.ceil(Math.sqrt((states.length * width) / height)));
  const rows = Math.max(1, Math.ceil(states.length / columns));
  const w = width / columns, h = height / rows, gap = w > 4 && h > 4 ? 1 : 0;
  states.forEach((state, i) => {
    draw.fillStyle = COLOURS[state];
    draw.fillRect((i % columns) * w, Math.floor(i / columns) * h, w - gap, h - gap);
  });
  const each = pool.blocks_per_cell;
  byId("pool-note").textContent =
    `${whole(pool.num_blocks)} blocks` + (each > 1 ? `, ${each} in a cell` : "");
  byId("legend").replaceChildren(...pool.names.map((name, i) => {
    const item = document.createElement("li"), square = document.createElement("i");
    square.style.background = COLOURS[i];
    item.append(square, `${name} ${whole(pool.counts[name])}`);
    return item;
  }));
}

function drawTree(tree) {
  const [draw, width, height] = context(byId("tree"));
  const deepest = Math.max(1, ...(tree.boxes || []).map((box) => box.to));
  boxes = (tree.boxes || []).map((box) => ({
    ...box, left: box.x * width, top: (box.from / deepest) * height,
    w: box.width * width, h: ((box.to - box.from) / deepest) * height,
  }));
  for (const box of boxes) {
    draw.fillStyle = box.references > 1 ? COLOURS[4] : box.references ? COLOURS[3]
      : box.idle_s >= 0 && box.idle_s < 10 ? COLOURS[2] : COLOURS[1];
    draw.fillRect(box.left, box.top, Math.max(0.5, box.w - (box.w > 3 ? 1 : 0)), Math.max(1, box.h - 1));
  }
  byId("tree-note").textContent = tree.num_nodes
    ? `${whole(tree.num_prefixes)} prefixes, ${whole(deepest)} tokens deep` : "nothing is cached";
}

function drawSeries(id, samples, lines, title) {
  const [draw, width, height] = context(byId(id));
  const top = Math.max(1, ...samples.flatMap((sample) => lines.map(([key]) => sample[key])));
  draw.font = "11px system-ui";
  lines.forEach(([key, label, colour], number) => {
    draw.strokeStyle = draw.fillStyle = colour;
    draw.lineWidth = 1.5;
    draw.beginPath();
    samples.forEach((sample, i) => {
      const x = width - (samples.length - 1 - i) * (width / 300);
      const y = height - 4 - (sample[key] / top) * (height - 24);
      if (i) draw.lineTo(x, y); else draw.moveTo(x, y);
    });
    draw.stroke();
    const last = samples.length ? samples[samples.length - 1][key] : 0;
    draw.fillText(`${label} ${whole(last)}/s`, 200 + number * 130, 12);
  });
  draw.fillStyle = getComputedStyle(document.body).color;
  draw.fillText(`${title}, up to ${whole(top)}/s`, 0, 12);
}

function fillFacts(facts) {
  const shown = facts && facts.epoch ? [
    ["usage", share(facts.usage)], ["hit rate", share(facts.hit_rate)], ["running", whole(facts.running)],
    ["clients", whole(facts.clients)], ["pinned blocks", whole(facts.pinned_blocks)],
    ["evicted blocks", whole(facts.evicted_blocks)], ["epoch", whole(facts.epoch)],
  ] : [];
  byId("facts").replaceChildren(...shown.map(([name, value]) => {
    const cell = document.createElement("div"), number = document.createElement("b");
    number.textContent = value;
    cell.append(number, name);
    return cell;
  }));
}

function row(cells) {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const place = document.createElement("td");
    place.append(cell);
    line.append(place);
  }
  return line;
}

function fillTiers(tiers) {
  const rows = tiers.map((tier) => {
    const meter = document.createElement("meter");
    meter.max = tier.capacity || 1;
    meter.value = tier.ready + tier.pending;
    return row([tier.name, meter, `${whole(tier.ready)} of ${whole(tier.capacity)} blocks`,
      `${bytesText(tier.stored_bytes)} stored`, `${bytesText(tier.loaded_bytes)} loaded`]);
  });
  byId("tiers").tBodies[0].replaceChildren(...(rows.length ? rows : [row(["no tiers below the device"])]));
}

function fillEvents(events) {
  const shown = events.seq === undefined ? [] : [
    ["events up to", events.seq === null ? "nothing yet" : String(events.seq)],
    ["complete", events.is_exact ? "yes" : "something is missing, and asked for"],
    ["same as the publisher's", events.is_same_state === null ? "not compared yet" : events.is_same_state ? "yes" : "NO"],
    ["blocks", Object.entries(events.blocks).map(([medium, n]) => `${medium} ${whole(n)}`).join(", ") || "none"],
    ["gaps closed", whole(events.gaps)],
  ];
  if (events.problem) shown.push(["problem", events.problem]);
  byId("events").tBodies[0].replaceChildren(...shown.map(row));
}

function show(picture) {
  byId("name").textContent = document.title = picture.name;
  byId("state").textContent = picture.state || "connecting";
  byId("state").className = "badge " + (picture.state || "");
  byId("model").textContent = picture.model || "";
  byId("problem").textContent = picture.problem || "";
  if (!picture.pool) return;
  fillFacts(picture.facts);
  drawPool(picture.pool);
  drawTree(picture.tree || {});
  drawSeries("tokens", picture.traffic, [["asked", "prompt", "#64748b"], ["hit", "cached", "#15803d"]], "tokens");
  drawSeries("blocks", picture.traffic, [["stored", "stored", "#2563eb"], ["removed", "removed", "#f59e0b"],
    ["evicted", "evicted", "#dc2626"]], "blocks");
  fillTiers(picture.tiers || []);
  fillEvents(picture.events || {});
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
}

byId("tree").addEventListener("mousemove", (event) => {
  const hit = boxes.filter((box) => event.offsetX >= box.left && event.offsetX <= box.left + Math.max(1, box.w)
    && event.offsetY >= box.top && event.offsetY <= box.top + box.h).pop();
  if (hit) byId("tree-hover").textContent =
    `${hit.digest}: tokens ${whole(hit.from)} to ${whole(hit.to)}, ${whole(hit.blocks)} blocks, used by ` +
    `${whole(hit.references)}, ${whole(hit.ends)} prefixes` + (hit.idle_s >= 0 ? `, idle ${hit.idle_s} s` : "") +
    (hit.namespace === "-" ? "" : `, ${hit.namespace}`);
});

const stream = new EventSource("stream");
stream.onmessage = (message) => show(JSON.parse(message.data));
stream.onerror = () => {
  byId("state").textContent = "connection lost, trying again";
  byId("state").className = "badge away";
};
