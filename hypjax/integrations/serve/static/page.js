"use strict";

const MOST_BYTES = 32 * 2 ** 20;
// Okabe and Ito's colours, which colour-blind readers can tell apart.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"];
const at = (id) => document.getElementById(id);
const uploads = []; // The files of this page, which "#upload-2" and so on name in its history.
let gallery = null; // What the server says of it.
let dots = []; // The images in the disk, with their circles.
let chosen = null; // The one that the keyboard or the pointer has chosen.
let latest = 0; // Number of the latest search, whose answer alone is shown.

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "circle", "path", "g", "line", "clipPath"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function picture(key, alt) {
  const image = element("img", { src: `thumbnail/${key}`, alt, loading: "lazy" });
  const frame = element("span", { class: "picture" }, image);
  image.addEventListener("error", () => frame.classList.add("missing"));
  return frame;
}

const fileOf = (image) => image.name.split("/").pop();
const short = (label) => (label?.length > 20 ? `${label.slice(0, 19).trim()}…` : label || "unknown class");
const named = (image) => [short(image.class), fileOf(image)].join(", ");

async function answer(url, options) {
  const response = await fetch(url, options);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("error", wrong);
}

// Searches with what the address names: words, an image of the gallery, or an upload.
async function search() {
  const number = ++latest, name = location.hash.slice(1);
  if (!name) return;
  const text = name.startsWith("text-") ? decodeURIComponent(name.slice(5)) : "";
  const upload = uploads[Number(name.split("upload-")[1])];
  if (name.startsWith("upload-") && !upload) return say("This image is gone; choose it again.", true);
  const query = new URLSearchParams({ k: at("k").value, class: at("class").value, places: true });
  if (text) query.set("text", text);
  say("Searching …");
  try {
    const found = text ? await answer(`search?${query}`)
      : upload ? await answer(`search?${query}`, { method: "POST", body: upload.file })
      : await answer(`search/${name}?${query}`);
    if (number === latest) show(found, upload, text);
  } catch (error) {
    if (number === latest) say(error instanceof TypeError ? "The server does not answer." : `Error: ${error.message}.`, true);
  }
}

function show(found, upload, text) {
  const { query, hits } = found;
  if (!text) at("query").src = upload ? upload.url : `thumbnail/${query.key}`;
  at("query").alt = text ? "" : `query: ${upload ? upload.file.name : query.class || query.name}`;
  at("query").hidden = Boolean(text);
  at("asked").textContent = text ? `“${text}”` : upload ? upload.file.name : named(query);
  const colours = {};
  for (const label of new Set(hits.map((hit) => hit.class)))
    if (label && Object.keys(colours).length < COLOURS.length) colours[label] = COLOURS[Object.keys(colours).length];
  at("heading").textContent = "Hits";
  at("hits").replaceChildren(...hits.map((hit, i) => item(hit, colours[hit.class], `${i + 1}. ${hit.distance.toFixed(3)}`)));
  draw([...gallery.sample, ...hits], colours, query.place);
  const count = hits.length === 1 ? "1 hit" : `${hits.length} hits`;
  const none = at("class").value ? `No ${gallery.noun} of this class.` : `No other ${gallery.noun}.`;
  say(hits.length ? count : none);
  document.title = `Search: ${at("asked").textContent}`;
}

// Shows an image of each of some classes, to begin a search with.
function browse(sample) {
  const classes = new Map(sample.map((image) => [image.class || image.key, image]));
  at("heading").textContent = "From the gallery";
  at("hits").replaceChildren(...[...classes.values()].slice(0, 12).map((image) => item(image)));
  draw(sample);
}

function item(hit, colour, rank = "") {
  const link = element("a", { href: `#${hit.key}` }, picture(hit.key, ""));
  link.append(element("strong", {}, rank), element("span", { class: "label", title: hit.class || "" }, short(hit.class)));
  link.append(element("span", { class: "name", title: hit.name }, fileOf(hit)));
  if (colour) link.style.setProperty("--colour", colour);
  link.addEventListener("pointerenter", () => choose(dots.find((dot) => dot.key === hit.key)));
  link.addEventListener("focus", () => choose(dots.find((dot) => dot.key === hit.key)));
  link.addEventListener("click", () => at("heading").focus());
  return element("li", {}, link);
}

// The disk: geodesics, one circle for each image, those of hits larger, and the query.
function draw(images, colours = {}, query = null) {
  const shown = new Map(images.map((image) => [image.key, image])); // A hit replaces its image of the sample.
  dots = [...shown.values()].sort((one, two) => ("distance" in one) - ("distance" in two));
  chosen = null;
  const circles = dots.map((dot) => {
    const hit = "distance" in dot;
    dot.circle = element("circle", { class: hit ? "dot hit" : "dot", cx: dot.place[0], cy: -dot.place[1], r: hit ? 0.03 : 0.014 });
    if (colours[dot.class]) dot.circle.style.setProperty("--colour", colours[dot.class]);
    dot.circle.addEventListener("pointerenter", () => choose(dot));
    dot.circle.addEventListener("click", () => { location.hash = dot.key; });
    return dot.circle;
  });
  const star = query && element("path", { class: "query", d: "M0-.06.018-.018.06 0 .018.018 0 .06-.018.018-.06 0-.018-.018Z", transform: `translate(${query[0]} ${-query[1]})` });
  at("disk").replaceChildren(...grid(), ...circles, ...(star ? [star] : []));
  at("caption").textContent = query ? "The star is the query; large circles are hits, coloured by class." : `Some ${gallery.noun}s of the gallery.`;
}

// Geodesics orthogonal to the axes, at distances 0, 1, 2, ... from the origin: arcs of circles.
function grid() {
  const lines = [element("line", { class: "grid", x1: -1, x2: 1 }), element("line", { class: "grid", y1: -1, y2: 1 })];
  for (let distance = 1; distance <= 4; distance++) {
    const foot = Math.tanh(distance / 2), centre = (1 + foot ** 2) / (2 * foot), r = (1 - foot ** 2) / (2 * foot);
    for (const [cx, cy] of [[centre, 0], [-centre, 0], [0, centre], [0, -centre]]) lines.push(element("circle", { class: "grid", cx, cy, r }));
  }
  const clip = element("clipPath", { id: "inside" }, element("circle", { r: 1 }));
  return [clip, element("g", { "clip-path": "url(#inside)" }, ...lines), element("circle", { class: "edge", r: 1 })];
}

function choose(dot) {
  if (!dot || dot === chosen) return;
  if (chosen) chosen.circle.classList.remove("chosen");
  chosen = dot;
  dot.circle.classList.add("chosen");
  const image = picture(dot.key, "").firstChild;
  at("caption").replaceChildren(image, element("span", {}, named(dot)));
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

// Chooses the nearest image in the direction of an arrow key.
function move(event) {
  if (event.key === "Enter" && chosen) location.hash = chosen.key;
  const arrow = ARROWS[event.key];
  if (!arrow) return;
  event.preventDefault();
  const [x, y] = chosen ? chosen.place : [0, 0];
  const ahead = dots.filter((dot) => dot !== chosen).map((dot) => {
    const step = [dot.place[0] - x, dot.place[1] - y], along = step[0] * arrow[0] + step[1] * arrow[1];
    return { dot, along, cost: Math.hypot(...step) * (1 + 2 * (1 - along / (Math.hypot(...step) || 1))) };
  });
  choose(ahead.filter(({ along }) => along > 0 || !chosen).sort((one, two) => one.cost - two.cost)[0]?.dot);
}

function upload(file) {
  if (!file) return;
  if (file.size > MOST_BYTES) return say("The image is larger than 32 MiB.", true);
  uploads.push({ file, url: URL.createObjectURL(file) });
  location.hash = `upload-${uploads.length - 1}`;
}

const imageOf = (data) => [...data.files].find((file) => file.type.startsWith("image/")) || data.files[0];

for (const id of ["file", "camera"])
  at(id).addEventListener("change", ({ target }) => { upload(target.files[0]); target.value = ""; });
document.addEventListener("paste", ({ clipboardData }) => upload(imageOf(clipboardData)));
document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dragging"); });
document.addEventListener("dragleave", () => document.body.classList.remove("dragging"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  upload(imageOf(event.dataTransfer));
});
at("disk").addEventListener("keydown", move);
at("options").addEventListener("submit", (event) => { event.preventDefault(); search(); });
at("options").addEventListener("change", ({ target }) => {
  const words = at("text").value.trim();
  if (target.id !== "text") search();
  else if (words) location.hash = `text-${encodeURIComponent(words)}`;
});
addEventListener("hashchange", search);

answer("gallery").then((found) => {
  gallery = found;
  at("about").textContent = `${found.images.toLocaleString("en")} ${found.noun}s`;
  at("words").hidden = !found.texts;
  at("classes").replaceChildren(...found.classes.map((label) => element("option", { value: label })));
  browse(found.sample);
  search();
}).catch(() => say("The server does not answer.", true));
