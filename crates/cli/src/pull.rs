//! `paceline pull`, `list` and `rm`: models of the hub, in the cache that other tools share.

use crate::args::{ListArgs, OutputArgs, PullArgs, RmArgs};
use crate::model::bytes;
use crate::progress::DownloadBar;
use crate::{bundled, places, resolve};
use anyhow::{Result, anyhow, bail};
use hub::known::{self, Part};
use hub::{Cache, Client, FileInfo, RepoId, is_model_file};
use serde_json::json;
use std::io::{self, Write};
use std::process::ExitCode;

/// Runs `paceline pull`. The path of each model that was fetched is printed on a line of its own.
pub(crate) fn run(args: &PullArgs, output: OutputArgs) -> Result<ExitCode> {
    if bundled::find(&args.model).is_some() {
        bail!(
            "`{}` is part of paceline and needs no download: use it with -m {}",
            args.model,
            args.model
        );
    }
    let (id, quant, revision) = resolve::parts(&args.model);
    let repo = RepoId::parse(id)?;
    // Shown even with --quiet: nothing else explains why the program waits.
    let client = Client::new(places::hub()).with_notice(|line| say!("{line}"));
    if args.head_only {
        head(&client, &repo, revision, output)?;
        return Ok(ExitCode::SUCCESS);
    }
    whole(&client, &repo, quant, revision, !args.no_mmproj, output)?;
    if args.draft {
        drafter(&client, &repo, revision, output)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Fetches a whole model: safetensors with their configuration, or the GGUF files of one format
/// if a format is named or there are no safetensors, and of these the file of the vision tower if
/// `with_tower` says so.
fn whole(
    client: &Client,
    repo: &RepoId,
    quant: Option<&str>,
    revision: &str,
    with_tower: bool,
    output: OutputArgs,
) -> Result<()> {
    let info = client.info(repo, revision)?;
    let mut files: Vec<FileInfo> = info.files.clone();
    // The file that stands for the model, if it is not the folder.
    let mut model = None;
    let has = |end: &str| info.files.iter().any(|f| f.name.ends_with(end));
    if quant.is_some() || has(".gguf") && !has(".safetensors") {
        let names = info.files.iter().map(|f| &*f.name);
        let mut chosen = hub::gguf::files(names.clone(), quant, &format!("`{repo}`"))?;
        if let Some(tower) = hub::gguf::tower(names, chosen[0]).filter(|_| with_tower) {
            chosen.push(tower);
        }
        model = Some(chosen[0]);
        files.retain(|file| chosen.contains(&&*file.name));
    } else {
        files.retain(|file| is_model_file(&file.name));
        if !has(".safetensors") {
            bail!("`{repo}` has neither safetensors nor GGUF files: paceline cannot run it");
        }
    }
    let total: u64 = files.iter().filter_map(|f| f.size).sum();
    if !output.quiet {
        say!("{repo}: {} files, {}", files.len(), bytes(total));
    }
    let mut bar = DownloadBar::new(!output.quiet);
    let folder = client.fetch(repo, revision, &info, &files, &mut |p| bar.set(p))?;
    bar.clear();
    let path = model.map_or(folder.clone(), |model| folder.join(model));
    writeln!(io::stdout(), "{}", path.display())?;
    Ok(())
}

/// Fetches the `mtp.*` tensors of `repo` alone.
fn head(client: &Client, repo: &RepoId, revision: &str, output: OutputArgs) -> Result<()> {
    let root = places::heads().ok_or_else(|| {
        anyhow!("neither XDG_DATA_HOME nor HOME is set: set one to say where heads are kept")
    })?;
    let info = client.info(repo, revision)?;
    let mut bar = DownloadBar::new(!output.quiet);
    let folder = hub::head::fetch(client, repo, &info, &root, &mut |p| bar.set(p))?;
    bar.clear();
    writeln!(io::stdout(), "{}", folder.display())?;
    Ok(())
}

/// Fetches the drafter of `repo` that the table `hub::known` names.
fn drafter(client: &Client, repo: &RepoId, revision: &str, output: OutputArgs) -> Result<()> {
    let known = known::drafters(repo.as_str());
    let Some(known) = known.into_iter().find(|k| k.is_advised) else {
        let snapshot = client.cache().snapshot(repo, revision);
        if snapshot.is_some_and(|s| resolve::has_head(&s)) {
            return Ok(());
        }
        bail!(
            "no drafter is known for `{repo}`: fetch one with `paceline pull ORG/NAME`, and name it with --draft"
        );
    };
    let source = RepoId::parse(known.repository)?;
    match known.part {
        Part::Whole => whole(client, &source, None, "main", false, output),
        Part::Head => {
            // The original has its own head, and so have conversions that kept it.
            let snapshot = client.cache().snapshot(repo, revision);
            if snapshot.is_some_and(|s| resolve::has_head(&s)) {
                return Ok(());
            }
            head(client, &source, "main", output)
        }
    }
}

/// Runs `paceline list`.
pub(crate) fn list(args: &ListArgs) -> Result<ExitCode> {
    let cache = Cache::new(places::hub().cache);
    let models = cache.list()?;
    let mut stdout = io::stdout().lock();
    if args.json {
        let names: Vec<&str> = bundled::BUNDLED.iter().map(|b| b.name).collect();
        let record = json!({"bundled": names, "cache": cache.root(), "models": models});
        writeln!(stdout, "{record}")?;
        return Ok(ExitCode::SUCCESS);
    }
    for bundled in bundled::BUNDLED {
        writeln!(stdout, "{:>9}  {}", "bundled", bundled.name)?;
    }
    for model in models {
        let state = model.incomplete.map(|why| {
            format!(
                "  (incomplete: {why}; `paceline pull {}` resumes it)",
                model.id
            )
        });
        writeln!(
            stdout,
            "{:>9}  {}{}",
            bytes(model.bytes),
            model.id,
            state.unwrap_or_default()
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `paceline rm`.
pub(crate) fn remove(args: &RmArgs, output: OutputArgs) -> Result<ExitCode> {
    let cache = Cache::new(places::hub().cache);
    let repos: Vec<RepoId> = args
        .models
        .iter()
        .map(|name| match bundled::find(name) {
            Some(_) => bail!("`{name}` is part of paceline and cannot be removed"),
            None => Ok(RepoId::parse(name)?),
        })
        .collect::<Result<_>>()?;
    for repo in repos {
        let head = places::heads().map(|root| hub::head::folder(&root, &repo));
        let head = head.filter(|folder| folder.is_dir());
        let removed = cache.remove(&repo)?;
        if let Some(head) = &head {
            std::fs::remove_dir_all(head)?;
        }
        match removed {
            None if head.is_none() => {
                bail!("`{repo}` is not in the cache `{}`", cache.root().display())
            }
            freed if !output.quiet => say!("{repo}: {} freed", bytes(freed.unwrap_or(0))),
            _ => {}
        }
    }
    Ok(ExitCode::SUCCESS)
}
